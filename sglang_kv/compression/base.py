"""What a KV-compression method is, and how a client's parameters become one.

A *stream* is one (layer, KV head) of one request. A method says which tokens a stream
keeps; the runtime owns pages, budgets and freeing. Nothing here knows SGLang.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from sglang_kv.compression.plan import Geometry, Plan


class PolicyError(ValueError):
    """A policy that a client or an operator asked for cannot be had.

    The message starts with the parameter's full name, e.g. ``kv_compression.recent``.
    """


class Candidates(NamedTuple):
    """The tokens of one request at a fold; a token is known by its index in its stream."""

    #: Attention received, summed over the scored queries and the group's query heads; fp32
    #: ``[layers, kv_heads, tokens]``, zero beyond a stream's length.
    scores: Tensor
    #: Tokens in each stream, int64 ``[layers, kv_heads]``.
    lengths: Tensor
    #: How many stay, int64 ``[layers, kv_heads]``; by page, what whole pages hold.
    kept: Tensor
    #: Logical position of each token, int64 as ``scores``; None: its index.
    positions: Tensor | None
    #: Tokens computed so far, whatever became of them.
    num_tokens: int
    #: First position whose query was scored.
    score_from: int
    page_size: int
    #: Gates of the heads, fp32 ``[layers, kv_heads]``; 1 where there are none.
    weights: Tensor


@dataclass(frozen=True)
class Compressor(ABC):
    """A method and its parameters: frozen, so its repr is its identity in logs and keys.

    What it does to one request, in positions and counts, is its `Plan`; which tokens it keeps
    where a plan needs scores is `choose`. A field's metadata says what a client may give:
    ``min`` and ``max`` (inclusive), ``choices``, ``doc``; and ``needs``: without that other
    parameter, or one of the values named after it, this one does nothing and is refused.
    """

    name: ClassVar[str]
    #: One line for tables and ``--help``.
    idea: ClassVar[str]
    #: What it costs beside attention over what it keeps.
    cost: ClassVar[str] = "nothing"
    paper: ClassVar[str] = ""
    #: Further keys that `from_params` understands, and what each means.
    aliases: ClassVar[dict[str, str]] = {}
    #: Whether a plan needs `Geometry.gates`.
    needs_gates: ClassVar[bool] = False
    #: Whether it scores tokens in every layer, which needs full attention there.
    scores_tokens: ClassVar[bool] = False

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """Build the policy from client parameters; raise `PolicyError` naming the bad one."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for key, value in params.items():
            if key not in fields:
                key = key if len(key) <= 60 else f"{key[:57]}..."
                known = ", ".join([*fields, *cls.aliases]) or "no parameters"
                raise PolicyError(
                    f"kv_compression.{key}: unknown parameter of {cls.name!r} (it takes: {known})"
                )
            check_value(key, value, fields[key])
        policy = cls(**params)
        policy.validate()
        for key in params:
            check_needs(key, fields[key], policy)
        return policy

    def validate(self) -> None:  # noqa: B027  # most methods have nothing to add
        """Raise `PolicyError` if parameters that are each valid do not go together."""

    @property
    def parameters(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @abstractmethod
    def plan(self, prompt_tokens: int, geometry: Geometry) -> Plan:
        """What this policy does to a request with such a prompt.

        Raises:
            PolicyError: it cannot be had for this request or model.
        """

    def choose(self, tokens: Candidates) -> Tensor:
        """Which tokens stay, for a `FoldPlan`: bool ``[layers, kv_heads, tokens]``, of which
        ``tokens.kept`` are true per stream. No argument is changed."""
        raise NotImplementedError

    @property
    def amounts(self) -> dict[str, int]:
        """Tokens that a long request's streams keep in the mean, by the parameter that says so:
        the first at the prompt's fold, the last in decode. Empty: everything, or not fixed."""
        return {}


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


#: Hold no method; tensors are needed when tokens are chosen, not when memory is planned.
_WITH_TENSORS = ("scoring",)


@cache
def _discover() -> None:
    package = importlib.import_module("sglang_kv.compression")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name in _WITH_TENSORS:
            continue
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


def require_more(key: str, value: int | None, than: str, least: int) -> None:
    """Raise `PolicyError` unless ``value`` (None: not given) leaves something beside ``least``."""
    if value is not None and value <= least:
        raise PolicyError(
            f"kv_compression.{key}: {value} leaves no token beside {than} {least} (it counts both)"
        )


def check_value(key: str, value: Any, field: dataclasses.Field[Any]) -> None:
    """Raise `PolicyError` unless ``value`` is what ``field`` takes."""
    meta = field.metadata
    if "choices" in meta:
        if value not in meta["choices"] or not isinstance(value, str):
            raise PolicyError(
                f"kv_compression.{key}: must be one of {', '.join(meta['choices'])}, "
                f"got {shorten(value)}"
            )
    elif "float" in str(field.type):
        check_float(key, value, meta.get("min", 0.0), meta.get("max"))
    else:
        check_int(key, value, meta.get("min", 0), meta.get("max"))


def check_needs(key: str, field: dataclasses.Field[Any], policy: Compressor) -> None:
    """Raise `PolicyError` if ``key``, which was given, does nothing in such a policy."""
    if "needs" not in field.metadata:
        return
    other, *values = field.metadata["needs"]
    value = getattr(policy, other)
    if value not in values if values else value is None:
        wanted = " or ".join(repr(choice) for choice in values)
        raise PolicyError(
            f"kv_compression.{key}: has no effect without {' '.join([other, wanted]).strip()}"
        )


def check_int(key: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    # bool is an int to Python; a client that sends true means something else.
    if isinstance(value, bool) or not isinstance(value, int):
        raise PolicyError(
            f"kv_compression.{key}: expected an integer, got "
            f"{type(value).__name__} {shorten(value)}"
        )
    if value < minimum:
        raise PolicyError(f"kv_compression.{key}: must be at least {minimum}, got {shorten(value)}")
    if maximum is not None and value > maximum:
        raise PolicyError(f"kv_compression.{key}: must be at most {maximum}, got {value}")
    # The kernels' tables hold int32.
    if value >= 2**31:
        raise PolicyError(f"kv_compression.{key}: must be less than 2**31, got {shorten(value)}")


def check_float(key: str, value: Any, minimum: float, maximum: float | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PolicyError(
            f"kv_compression.{key}: expected a number, got {type(value).__name__} {shorten(value)}"
        )
    # A NaN fails every comparison, so it is asked what holds, not what fails.
    if not minimum <= value or not value < float("inf"):
        raise PolicyError(f"kv_compression.{key}: must be at least {minimum}, got {shorten(value)}")
    if maximum is not None and not value <= maximum:
        raise PolicyError(f"kv_compression.{key}: must be at most {maximum}, got {shorten(value)}")
    # A report carries it, and JSON has no integers of any size.
    if value >= 2**31:
        raise PolicyError(f"kv_compression.{key}: must be less than 2**31, got {shorten(value)}")
