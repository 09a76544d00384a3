"""What a KV-compression method is, and how a client's parameters become one.

A *stream* is one (layer, KV head) of one request. A method says which tokens a stream
keeps; the runtime owns pages, budgets and freeing. Nothing here knows SGLang.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple, TypeVar


class PolicyError(ValueError):
    """A policy that a client or an operator asked for cannot be had.

    The message starts with the parameter's full name, e.g. ``kv_compression.recent``.
    """


class Window(NamedTuple):
    """What the streams of a request see, in FlashInfer's convention.

    A query at logical position ``t`` sees key position ``p`` iff
    ``p < num_sinks or t - p <= window_left``; ``window_left == -1`` sees everything.
    """

    num_sinks: int = 0
    window_left: int = -1

    def sink_pages(self, page_size: int) -> int:
        """Pages that the sinks occupy."""
        return -(-self.num_sinks // page_size)

    def first_page(self, position: int, page_size: int) -> int:
        """First token page after the sinks that a query at ``position`` still needs.

        The one place where host and kernels take the window's edge from: the page of
        position ``position - window_left``, never before the end of the sinks.
        """
        sinks = self.sink_pages(page_size)
        if self.window_left < 0:
            return sinks
        return max(sinks, (position - self.window_left) // page_size)

    def pages(self, num_tokens: int, page_size: int) -> int:
        """Pages one stream holds once ``num_tokens`` are computed and the rest dropped."""
        total = -(-num_tokens // page_size)
        if self.window_left < 0:
            return total
        dropped = self.first_page(num_tokens, page_size) - self.sink_pages(page_size)
        return total - min(dropped, max(0, total - self.sink_pages(page_size)))


@dataclass(frozen=True)
class Compressor:
    """A method and its parameters: frozen, so its repr is its identity in logs and keys."""

    name: ClassVar[str]
    #: One line for tables and ``--help``.
    idea: ClassVar[str]
    paper: ClassVar[str] = ""
    #: Further keys that `from_params` understands, and what each means.
    aliases: ClassVar[dict[str, str]] = {}

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Compressor:
        """Build the policy from client parameters; raise `PolicyError` naming the bad one."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for key, value in params.items():
            if key not in fields:
                key = key if len(key) <= 60 else f"{key[:57]}..."
                known = ", ".join([*fields, *cls.aliases]) or "no parameters"
                raise PolicyError(
                    f"kv_compression.{key}: unknown parameter of {cls.name!r} (it takes: {known})"
                )
            _check_int(key, value, fields[key].metadata.get("min", 0))
        return cls(**params)

    @property
    def parameters(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @property
    def window(self) -> Window:
        """What a query of this request sees."""
        return Window()

    def fold_position(self, prompt_tokens: int) -> int | None:
        """Position at which the policy takes hold of a prompt; None: from its first token.

        Everything before it is computed with full attention. A chunk ends there, and a
        retracted request that is computed again folds at the same place.
        """
        return None

    @property
    def dense_prefix(self) -> int | None:
        """Leading tokens whose KV equals full attention's at every layer; None: all of them.

        Only these may be matched and published under a plain prefix-cache key.
        """
        return None

    @property
    def min_kept(self) -> int | None:
        """Fewest tokens a stream of a long request keeps; None: everything."""
        return None

    def kept_tokens(self, num_tokens: int) -> int:
        """Tokens of ``num_tokens`` that the next query of a stream can still see."""
        return num_tokens

    def steady_pages(self, num_tokens: int, page_size: int) -> int:
        """Pages of one stream between two steps, with ``num_tokens`` computed."""
        return self.window.pages(num_tokens, page_size)

    def peak_pages(
        self,
        num_tokens: int,
        page_size: int,
        chunk: int | None,
        fold_at: int | None = None,
        *,
        matched: int = 0,
        published: int = 0,
    ) -> int:
        """Most pages per stream that a prefill of ``num_tokens`` takes from the pool at once.

        Args:
            num_tokens: length of the prompt.
            chunk: most tokens that one forward computes (``None``: the whole prompt).
            fold_at: `fold_position` of the request.
            matched: pages that came from the prefix tree. They save a page each only while the
                request reads them: when its window has left them, it stands on its own pages.
            published: pages that the tree takes over. Others may come to read them, so they do
                not count as given back when this request drops them.
        """
        window = self.window
        fresh = -(-num_tokens // page_size) - matched
        if window.window_left < 0 or chunk is None or chunk >= num_tokens:
            return fresh
        # A chunk may start anywhere inside a page, hence one more page than it fills.
        windowed = window.pages(num_tokens, page_size) + -(-chunk // page_size) + 1
        dense = -(-(fold_at or 0) // page_size) - matched
        return min(fresh, max(windowed + max(0, published - matched), dense))


C = TypeVar("C", bound=type[Compressor])
_METHODS: dict[str, type[Compressor]] = {}


def register(name: str) -> Callable[[C], C]:
    """Class decorator that enters a method in the registry under ``name``."""

    def enter(cls: C) -> C:
        if name in _METHODS:
            raise ValueError(f"compression method {name!r} is registered twice")
        if not getattr(cls, "idea", ""):
            raise ValueError(f"compression method {name!r} has no `idea` line")
        cls.name = name
        _METHODS[name] = cls
        return cls

    return enter


@cache
def _discover() -> None:
    package = importlib.import_module("sglang_kv.compression")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def methods() -> dict[str, type[Compressor]]:
    """All methods by name, ``none`` first."""
    _discover()
    return dict(sorted(_METHODS.items(), key=lambda item: (item[0] != "none", item[0])))


def method_names() -> tuple[str, ...]:
    return tuple(methods())


def parse_policy(spec: Any) -> Compressor:
    """A client's ``{"method": ..., parameters...}`` (or just a method's name) as a policy.

    Raises:
        PolicyError: the message names the parameter.
    """
    if isinstance(spec, str):
        spec = {"method": spec}
    if not isinstance(spec, Mapping):
        raise PolicyError(
            f"kv_compression: expected an object or a method's name, got {type(spec).__name__}"
        )
    params = dict(spec)
    method = params.pop("method", None)
    if method is None:
        raise PolicyError("kv_compression.method: missing")
    if not isinstance(method, str) or method not in methods():
        raise PolicyError(
            f"kv_compression.method: unknown method {shorten(method)} "
            f"(this server has: {', '.join(method_names())})"
        )
    return methods()[method].from_params(params)


def shorten(value: Any) -> str:
    """A client's value as it may stand in a message and a log line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_int(key: str, value: Any, minimum: int) -> None:
    # bool is an int to Python; a client that sends true means something else.
    if isinstance(value, bool) or not isinstance(value, int):
        raise PolicyError(
            f"kv_compression.{key}: expected an integer, got "
            f"{type(value).__name__} {shorten(value)}"
        )
    if value < minimum:
        raise PolicyError(f"kv_compression.{key}: must be at least {minimum}, got {value}")
    # The kernels' tables hold int32.
    if value >= 2**31:
        raise PolicyError(f"kv_compression.{key}: must be less than 2**31, got {value}")
