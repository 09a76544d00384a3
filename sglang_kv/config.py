"""What the operator asked for: server flags, environment, and the server's default policy."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sglang_kv.compression import Compressor, PolicyError, method_names, parse_policy
from sglang_kv.compression.base import shorten

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
            self._check_keep(self.default_policy)

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
        self._check_keep(policy)
        return policy, False

    def evictable(self, wanted: Any | None) -> bool:
        """Whether pressure may take pages of a request whose ``kv_pressure`` is ``wanted``.

        Raises:
            PolicyError: it is no such word, or asks for what this server does not do.
        """
        if wanted is None:
            return self.pressure == "evict"
        if wanted not in PRESSURES:
            raise PolicyError(f"{PRESSURE_KEY}: must be evict or retract, got {shorten(wanted)}")
        if wanted == "evict" and self.pressure != "evict":
            raise PolicyError(
                f"{PRESSURE_KEY}: this server was started without --kv-pressure evict"
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

    def _check_keep(self, policy: Compressor) -> None:
        if policy.min_kept is not None and policy.min_kept < self.min_keep:
            raise PolicyError(
                f"kv_compression: {policy!r} keeps {policy.min_kept} tokens, below this "
                f"server's --kv-compression-min-keep {self.min_keep}"
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
