"""Stand-in for `sgl_kernel.mamba`: hybrid models then fail by the name of what they lack."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from sgl_kernel import missing_op

OPS = frozenset({"causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu"})


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name in OPS:
        return missing_op(__name__, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
