"""What the operator asked for: server flags, environment, and the server's default policy."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sglang_kv.compression import (
    Compressor,
    Geometry,
    Plan,
    PolicyError,
    WindowPlan,
    method_names,
    parse_policy,
)
from sglang_kv.compression.base import shorten
from sglang_kv.compression.least import least_kept

#: JSON of `Options`; how ``sglang_kv.Engine`` and children without flags learn them.
ENV = "SGLANG_KV_OPTIONS"
#: Key of a request's policy in ``custom_params``.
REQUEST_KEY = "kv_compression"
#: And of what may happen to it when memory runs out.
PRESSURE_KEY = "kv_pressure"
PRESSURES = ("evict", "retract")
#: Who may share prefixes: whoever sends the same tokens, one tenant's requests, nobody.
SHARINGS = ("all", "tenant", "off")
#: Key of which prefixes a request takes: those that change nothing in its answer, or thinned ones.
PREFIX_KEY = "kv_prefix"
PREFIXES = ("exact", "thinned")
#: All that a request may say; other keys with their beginning are mistakes.
REQUEST_KEYS = (REQUEST_KEY, PRESSURE_KEY, PREFIX_KEY)
#: Tokens of a prompt that no budget in use covers.
LONG = 1 << 20
_SERVER_ARGS_ATTR = "_sglang_kv_options"


@dataclass(frozen=True)
class Options:
    """Server-wide settings; ``method`` None means that sglang-kv stays out of the way."""

    method: str | None = None
    config: dict[str, Any] | None = None  # parameters of the default method
    allow: tuple[str, ...] | None = None  # methods a client may ask for; None: all
    min_keep: int = 0  # fewest tokens per stream that a policy may keep
    override: str = "client"  # who wins when both server and client name a policy
    virtual_tokens: int | None = None  # capacity of the virtual ledger
    gates: str | None = None  # file of the model's head gates; None: what is shipped for it
    pressure: str = "retract"  # who gives way when memory runs out in decode
    pressure_floor: float = 0.25  # share of its tokens that a request keeps under pressure
    prefix_sharing: str = "all"  # who may share prefixes
    prefix_thinning: bool = False  # all prefixes are thinned before any is emptied
    tenant_header: str | None = None  # HTTP header that names the tenant; None: the credential
    #: What proves to the scheduler that a tenant was found by this server's own HTTP process.
    secret: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        known = method_names()
        for name in self.allow or ():
            if name not in known:
                raise PolicyError(
                    f"--kv-compression-allow: unknown method {name!r} (known: {', '.join(known)})"
                )
        if self.override not in ("client", "server"):
            raise PolicyError(
                f"--kv-compression-override: expected client or server, got {self.override!r}"
            )
        if self.pressure not in PRESSURES:
            raise PolicyError(f"--kv-pressure: expected evict or retract, got {self.pressure!r}")
        floor = self.pressure_floor
        if isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 < floor <= 1:
            raise PolicyError(f"--kv-pressure-floor: must be above 0 and at most 1, got {floor!r}")
        for flag, value in (
            ("--kv-compression-min-keep", self.min_keep),
            ("--kv-virtual-tokens", self.virtual_tokens),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise PolicyError(f"{flag}: expected an integer, got {value!r}")
            if value is not None and value < 0:
                raise PolicyError(f"{flag}: must not be negative, got {value}")
        if self.prefix_sharing not in SHARINGS:
            raise PolicyError(
                f"--prefix-sharing: expected off, tenant or all, got {self.prefix_sharing!r}"
            )
        if self.tenant_header is not None and self.prefix_sharing != "tenant":
            raise PolicyError("--tenant-header needs --prefix-sharing tenant")
        if self.method is None:
            if self.prefix_sharing != "all":
                raise PolicyError("--prefix-sharing needs --kv-compression METHOD")
            if self.prefix_thinning:
                raise PolicyError("--prefix-thinning needs --kv-compression METHOD")
            if self.config:
                raise PolicyError("--kv-compression-config needs --kv-compression METHOD")
            if self.gates is not None:
                raise PolicyError("--kv-gates needs --kv-compression METHOD")
            if self.pressure == "evict":
                raise PolicyError("--kv-pressure needs --kv-compression METHOD")
        else:
            if "method" in (self.config or {}):
                raise PolicyError(
                    "--kv-compression-config: holds parameters only; the method is "
                    "--kv-compression's"
                )
            self._check_amounts(self.default_policy, self.config)

    @property
    def active(self) -> bool:
        return self.method is not None

    @property
    def default_policy(self) -> Compressor:
        """The policy of requests that name none."""
        return parse_policy({**(self.config or {}), "method": self.method or "none"})

    def policy_for(self, spec: Any | None) -> tuple[Compressor, bool]:
        """The policy for a client's ``kv_compression`` value, and whether it was overridden.

        Raises:
            PolicyError: bad, not allowed or below ``--kv-compression-min-keep``.
        """
        if spec is None:
            return self.default_policy, False
        policy = parse_policy(spec)
        if self.override == "server":
            return self.default_policy, policy != self.default_policy
        if self.allow is not None and policy.name not in self.allow:
            raise PolicyError(
                f"kv_compression.method: {policy.name!r} is not allowed on this server "
                f"(allowed: {', '.join(self.allow)})"
            )
        self._check_amounts(policy, spec)
        return policy, False

    def check_kept(self, policy: Compressor, plan: Plan, spec: Any | None) -> None:
        """Raise `PolicyError` if any stream of a request is left less than this server allows.

        Args:
            policy: the request's.
            plan: what it does to it.
            spec: what the policy was made of, as in `policy_for`; None: the server's default.
        """
        if not self.min_keep:
            return
        least = least_kept(plan)
        if least is not None and least.tokens < self.min_keep:
            name = [*policy.amounts][-1 if least.in_decode else 0]
            where = " in decode" if least.in_decode else ""
            self._refuse(
                _as_given(name, policy, self.config if spec is None else spec),
                f"{policy.name!r} leaves head {least.head} of layer {least.layer} with "
                f"{least.tokens} tokens{where}",
            )

    def check_default(self, geometry: Geometry) -> None:
        """Raise `PolicyError` where such a model rules the default policy out, or leaves too little
        of long requests: a server that would refuse them all had better not start."""
        policy = self.default_policy
        policy.plan(1, geometry)
        # By page, what is left depends on where in a page a prompt ends.
        for tokens in range(LONG, LONG + geometry.page_size if self.min_keep else LONG):
            self.check_kept(policy, policy.plan(tokens, geometry), None)

    def evictable(self, wanted: Any | None, plan: Plan | None = None) -> bool:
        """Whether pressure may take pages of a request whose ``kv_pressure`` is ``wanted``.

        ``plan``: what its own policy does to it, where that is known.

        Raises:
            PolicyError: it is no such word, or asks for what this server does not do, or for what
                does nothing to such a request.
        """
        if wanted is None:
            return self.pressure == "evict"
        if wanted not in PRESSURES:
            raise PolicyError(f"{PRESSURE_KEY}: must be evict or retract, got {shorten(wanted)}")
        if wanted == "evict" and self.pressure != "evict":
            raise PolicyError(
                f"{PRESSURE_KEY}: this server was started without --kv-pressure evict"
            )
        if wanted == "evict" and isinstance(plan, WindowPlan):
            raise PolicyError(
                f"{PRESSURE_KEY}: evict takes nothing from requests with a window (streamingllm, "
                "duoattention), which hold no more than they need"
            )
        if wanted == "evict" and plan is not None and plan.geometry.sliding_layers:
            raise PolicyError(
                f"{PRESSURE_KEY}: evict takes nothing where layers have a sliding window, as in "
                "this model"
            )
        return bool(wanted == "evict")

    def takes_thinned(self, wanted: Any | None) -> bool:
        """Whether a request whose ``kv_prefix`` is ``wanted`` may go on from thinned prefixes.

        Raises:
            PolicyError: it is no such word, or asks for what this server does not do.
        """
        if wanted is None:
            return False
        if wanted not in PREFIXES:
            raise PolicyError(f"{PREFIX_KEY}: must be exact or thinned, got {shorten(wanted)}")
        if wanted == "thinned" and not self.prefix_thinning:
            raise PolicyError(f"{PREFIX_KEY}: this server was started without --prefix-thinning")
        return bool(wanted == "thinned")

    def _check_amounts(self, policy: Compressor, spec: Any) -> None:
        """What can be said without the prompt and the model; `check_kept` has the rest."""
        for name, tokens in policy.amounts.items():
            if tokens < self.min_keep:
                self._refuse(
                    _as_given(name, policy, spec), f"{policy.name!r} keeps {tokens} tokens"
                )

    def _refuse(self, name: str, what: str) -> None:
        raise PolicyError(
            f"kv_compression.{name}: {what}, below this server's --kv-compression-min-keep "
            f"{self.min_keep}"
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Options:
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise PolicyError(f"{ENV}: unknown option {unknown[0]!r}")
        values = dict(values)
        if values.get("allow") is not None:
            values["allow"] = tuple(values["allow"])
        return cls(**values)

    @classmethod
    def from_env(cls) -> Options:
        text = os.environ.get(ENV)
        if not text:
            return cls()
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise PolicyError(f"{ENV}: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise PolicyError(f"{ENV}: expected a JSON object")
        return cls.from_mapping(values)

    # -- riding on SGLang's ServerArgs, which its child processes receive --

    def attach(self, server_args: Any) -> None:
        setattr(server_args, _SERVER_ARGS_ATTR, asdict(self))

    @classmethod
    def of(cls, server_args: Any) -> Options:
        """The options that ``server_args`` carries, else those of the environment."""
        carried = getattr(server_args, _SERVER_ARGS_ATTR, None)
        return cls.from_mapping(carried) if carried is not None else cls.from_env()


def _as_given(name: str, policy: Compressor, spec: Any) -> str:
    """The parameter's name, or the short form that was given in its place."""
    given = [key for key in policy.aliases if isinstance(spec, Mapping) and key in spec]
    return given[0] if given else name


def refuse_unknown(custom_params: Mapping[Any, Any]) -> None:
    """Raise `PolicyError` for a misspelt key: served anyway, the client would not notice."""
    for key in custom_params:
        if str(key).startswith("kv_") and key not in REQUEST_KEYS:
            raise PolicyError(
                f"custom_params: {shorten(key)} is unknown, expected {', '.join(REQUEST_KEYS)}"
            )
