"""SGLang's offline engine with KV compression.

    from sglang_kv.engine import Engine

    engine = Engine(model_path="...", kv_compression="streamingllm")
    short = {"kv_compression": {"method": "streamingllm", "budget": 512}}
    engine.generate("...", {"max_new_tokens": 32, "custom_params": short})  # this request only

`sglang.Engine` works too, with the options in the environment: SGLANG_KV_OPTIONS.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sglang_kv.compression.gates import load_gates
from sglang_kv.config import ENV, Options
from sglang_kv.cpu import finder

# For a program that sets SGLANG_USE_CPU_ENGINE itself, after the interpreter's start.
finder.install()

from sglang.srt.entrypoints.engine import Engine as SGLangEngine  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402

from sglang_kv.plugin import verify  # noqa: E402

#: Arguments, and the fields of `Options` they set.
ARGUMENTS = {
    "kv_compression": "method",
    "kv_compression_config": "config",
    "kv_compression_allow": "allow",
    "kv_compression_min_keep": "min_keep",
    "kv_compression_override": "override",
    "kv_virtual_tokens": "virtual_tokens",
    "kv_gates": "gates",
    "kv_pressure": "pressure",
    "kv_pressure_floor": "pressure_floor",
    "prefix_sharing": "prefix_sharing",
    "prefix_thinning": "prefix_thinning",
}


class Engine(SGLangEngine):
    """`sglang.Engine` which also takes the options of the server's `--kv-...` flags."""

    def __init__(self, **kwargs: Any) -> None:
        given = {field: kwargs.pop(name) for name, field in ARGUMENTS.items() if name in kwargs}
        with options_in_environment(given):
            if Options.from_env().active:
                # SGLANG_PLUGINS may leave ours out, and the engine would serve uncompressed.
                load_plugins()
                verify()
                if "radix_eviction_policy" in kwargs:
                    # SGLang takes its default for ours to replace, unless told that it was chosen.
                    kwargs.setdefault("_radix_eviction_policy_explicitly_set", True)
            super().__init__(**kwargs)


@contextmanager
def options_in_environment(given: Mapping[str, Any]) -> Iterator[None]:
    """ServerArgs has no room for them, and the engine's processes inherit the environment.

    Only while they start, so that the next engine of this program begins without them.

    Raises:
        PolicyError: an option is unknown or wrong.
    """
    before = os.environ.get(ENV)
    if given:
        options = {**json.loads(before or "{}"), **given}
        gates = Options.from_mapping(options).gates
        if gates is not None:
            load_gates(gates)  # what cannot be read stops the program here
        os.environ[ENV] = json.dumps(options)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(ENV, None)
        else:
            os.environ[ENV] = before
