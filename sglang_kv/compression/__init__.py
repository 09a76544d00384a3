"""KV-compression methods: one file each, found by discovery.

``none`` and every other method is a frozen dataclass of its parameters; adding a
method means adding one module to this package.
"""

from sglang_kv.compression.base import (
    Compressor,
    PolicyError,
    Window,
    method_names,
    parse_policy,
    register,
)

__all__ = ["Compressor", "PolicyError", "Window", "method_names", "parse_policy", "register"]
