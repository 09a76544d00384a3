"""What the operator asked for: server flags, environment, and the server's default policy."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sglang_kv.compression import Compressor, PolicyError, method_names, parse_policy
from sglang_kv.compression.base import methods
from sglang_kv.compression.gates import are_shipped
from sglang_kv.presets import PRESETS

#: JSON of `Options`; how ``sglang_kv.Engine`` and children without flags learn them.
ENV = "SGLANG_KV_OPTIONS"
#: Key of a request's policy in ``custom_params``.
REQUEST_KEY = "kv_compression"
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
        for flag, value in (
            ("--kv-compression-min-keep", self.min_keep),
            ("--kv-virtual-tokens", self.virtual_tokens),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise PolicyError(f"{flag}: expected an integer, got {value!r}")
            if value is not None and value < 0:
                raise PolicyError(f"{flag}: must not be negative, got {value}")
        if self.method is None:
            if self.config:
                raise PolicyError("--kv-compression-config needs --kv-compression METHOD")
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


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The server's flags. Defaults are None so that the environment can fill them."""
    ideas = "; ".join(f"{name}: {cls.idea}" for name, cls in methods().items())
    group = parser.add_argument_group(
        "KV compression (sglang-kv)",
        "Serve long contexts in a fraction of the KV memory. A request may choose its own "
        f'policy with custom_params: {{"{REQUEST_KEY}": {{"method": ..., parameters}}}}.',
    )
    group.add_argument(
        "--kv-compression",
        metavar="METHOD",
        choices=method_names(),
        help="Turns sglang-kv on; METHOD is the policy of requests that name none. " + ideas,
    )
    group.add_argument(
        "--kv-compression-config",
        metavar="JSON|@FILE",
        help="Parameters of METHOD as a JSON object, or @ and a file that holds one.",
    )
    group.add_argument(
        "--kv-compression-allow",
        metavar="METHODS",
        help="Comma-separated methods that requests may ask for (default: all).",
    )
    group.add_argument(
        "--kv-compression-min-keep",
        metavar="TOKENS",
        type=int,
        help="Refuse policies that keep fewer tokens per layer and head (default: 0).",
    )
    group.add_argument(
        "--kv-compression-override",
        choices=("client", "server"),
        help="Who wins when both name a policy. With 'server' every request gets METHOD, and "
        "its report says so (default: client).",
    )
    group.add_argument(
        "--kv-virtual-tokens",
        metavar="TOKENS",
        type=int,
        help="Logical tokens that may be in flight at once, dropped ones included (default: "
        "8 times what the pool holds, and at least four full contexts). Costs 4 bytes per "
        "page, layer and head of host memory.",
    )
    _add_model_flags(group)


def _add_model_flags(group: Any) -> None:
    group.add_argument(
        "--kv-preset",
        metavar="PRESET",
        choices=tuple(PRESETS),
        help="In place of --kv-compression: a method with tuned parameters, which "
        "--kv-compression-config may change. "
        + "; ".join(f"{name}: {preset.purpose}" for name, preset in PRESETS.items()),
    )
    group.add_argument(
        "--kv-gates",
        metavar="FILE",
        help="The model's head gates, for duoattention and for layers whose heads choose together: "
        "JSON of scripts/calibrate_heads.py, or a published pattern's TSV or its folder (default: "
        "what is shipped for the model, if anything).",
    )


def options_from_flags(args: argparse.Namespace) -> Options:
    """Flags over environment over defaults."""
    values: dict[str, Any] = asdict(Options.from_env())
    config = args.kv_compression_config
    if config is not None:
        text = Path(config[1:]).read_text() if config.startswith("@") else config
        try:
            values["config"] = json.loads(text)
        except json.JSONDecodeError as error:
            raise PolicyError(f"--kv-compression-config: not JSON: {error}") from None
        if not isinstance(values["config"], dict):
            raise PolicyError("--kv-compression-config: expected a JSON object")
    if args.kv_compression_allow is not None:
        values["allow"] = [s.strip() for s in args.kv_compression_allow.split(",") if s.strip()]
    if args.kv_preset is not None:
        if args.kv_compression is not None:
            raise PolicyError("--kv-preset: give either --kv-preset or --kv-compression, not both")
        gates = args.kv_gates or values["gates"] or are_shipped(args.model_path or args.model or "")
        preset = PRESETS[args.kv_preset].policy(has_gates=bool(gates))
        values["method"] = preset.pop("method")
        values["config"] = {**preset, **(values["config"] or {})}
    for name, flag in (
        ("method", "kv_compression"),
        ("min_keep", "kv_compression_min_keep"),
        ("override", "kv_compression_override"),
        ("virtual_tokens", "kv_virtual_tokens"),
        ("gates", "kv_gates"),
    ):
        if getattr(args, flag) is not None:
            values[name] = getattr(args, flag)
    return Options.from_mapping(values)
