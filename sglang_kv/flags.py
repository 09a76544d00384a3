"""The server's flags, and the options they make."""

from __future__ import annotations

import argparse
import json
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_kv.compression import PolicyError, method_names
from sglang_kv.compression.base import methods
from sglang_kv.compression.gates import has_gates, load_gates
from sglang_kv.config import (
    PREFIX_KEY,
    PRESSURE_KEY,
    PRESSURES,
    REQUEST_KEY,
    SHARINGS,
    Options,
)
from sglang_kv.presets import PRESETS, apply_preset


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
        help="Refuse policies that leave any layer's head fewer tokens than this, at the prompt's "
        "fold or a later one; a shorter prompt that is kept whole is no such case (default: 0).",
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
    _add_pressure_flags(group)
    _add_prefix_flags(group)


def _add_prefix_flags(group: Any) -> None:
    group.add_argument(
        "--prefix-sharing",
        choices=SHARINGS,
        help="Who may share cached prefixes: whoever sends the same tokens; one tenant's requests, "
        "as told by their credential or --tenant-header, and a request without either with nobody; "
        "nobody. A request's cache_salt can only narrow that (default: all).",
    )
    group.add_argument(
        "--tenant-header",
        metavar="NAME",
        help="With --prefix-sharing tenant: the HTTP header that names a request's tenant, set by "
        "whoever authenticates in front of this server, in place of any that a client sent: a "
        "request with two of them has no identity (default: the Authorization header).",
    )
    group.add_argument(
        "--prefix-thinning",
        action="store_true",
        default=None,
        help="Under pressure, all cached prefixes lose what DuoAttention's streaming heads would "
        "not look at before any is lost. What is left serves duoattention requests that ask for "
        f'it, custom_params: {{"{PREFIX_KEY}": "thinned"}}, and no others.',
    )


def _add_model_flags(group: Any) -> None:
    group.add_argument(
        "--kv-preset",
        metavar="PRESET",
        choices=tuple(PRESETS),
        help="In place of --kv-compression: a method with tuned parameters, which "
        "--kv-compression-config may change. "
        + "; ".join(
            f"{name}: {preset.purpose} (tuned on {preset.tuned_on})"
            for name, preset in PRESETS.items()
        ),
    )
    group.add_argument(
        "--kv-gates",
        metavar="FILE",
        help="The model's head gates, for duoattention and for layers whose heads choose together: "
        "JSON of sglang-kv calibrate, or a published pattern's TSV or its folder (default: "
        "what is shipped for the model, if anything). How many sinks and recent tokens streaming "
        "heads keep is the policy's to say; the file's counts are not used.",
    )


def _add_pressure_flags(group: Any) -> None:
    group.add_argument(
        "--kv-pressure",
        choices=PRESSURES,
        help="When memory runs out in decode: retract a request, to be computed again later, as "
        "SGLang does; or evict the least important pages of requests first. A request may opt out "
        f'with custom_params: {{"{PRESSURE_KEY}": "retract"}}. Requests with a window '
        "(streamingllm, duoattention) give up nothing (default: retract).",
    )
    group.add_argument(
        "--kv-pressure-floor",
        metavar="SHARE",
        type=float,
        help="Share of its tokens that a request keeps under pressure (default: 0.25), and never "
        "fewer than --kv-compression-min-keep.",
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
    if args.kv_gates is not None:
        load_gates(args.kv_gates)  # what cannot be read stops the server here
    if args.kv_preset is not None:
        if args.kv_compression is not None:
            raise PolicyError("--kv-preset: give either --kv-preset or --kv-compression, not both")
        gates = args.kv_gates or values["gates"] or has_gates(str(args.model_path))
        values |= apply_preset(args.kv_preset, values["config"], has_gates=bool(gates))
    for name, flag in (
        ("method", "kv_compression"),
        ("min_keep", "kv_compression_min_keep"),
        ("override", "kv_compression_override"),
        ("virtual_tokens", "kv_virtual_tokens"),
        ("gates", "kv_gates"),
        ("pressure", "kv_pressure"),
        ("pressure_floor", "kv_pressure_floor"),
        ("prefix_sharing", "prefix_sharing"),
        ("tenant_header", "tenant_header"),
        ("prefix_thinning", "prefix_thinning"),
    ):
        if getattr(args, flag) is not None:
            values[name] = getattr(args, flag)
    if values["prefix_sharing"] == "tenant":
        values["secret"] = secrets.token_hex(16)
    return Options.from_mapping(values)
