"""KV-compression methods: one file each, found by discovery.

``none`` and every other method is a frozen dataclass of its parameters; adding a
method means adding one module to this package.
"""

from sglang_kv.compression.base import (
    Compressor,
    PolicyError,
    method_names,
    parse_policy,
    register,
)
from sglang_kv.compression.plan import FoldPlan, Geometry, Plan, Window, WindowPlan

__all__ = [
    "Compressor",
    "FoldPlan",
    "Geometry",
    "Plan",
    "PolicyError",
    "Window",
    "WindowPlan",
    "method_names",
    "parse_policy",
    "register",
]
