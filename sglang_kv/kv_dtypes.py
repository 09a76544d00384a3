"""8-bit pages (``--kv-cache-dtype fp8_e4m3`` or ``fp8_e5m2``): their scales, and CPUs.

SGLang keeps ``K / k_scale`` and ``V / v_scale`` in an 8-bit cache, and its attention multiplies
scores by the one and results by the other. The scales are a layer's: from an FP8 checkpoint, or
``--quantization-param-path``, 1 without either. Head pages are read and written likewise.

On CPUs SGLang itself has 8-bit KV for AMX only, and refuses the rest. The kernels here need no
AMX; the hooks below lift these refusals, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sglang_kv.kernels.layout import FP8_DTYPES
from sglang_kv.startup import active_options

_FLAGS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Scales(NamedTuple):
    """What the pages of a layer hold times these are its keys and values."""

    k_scale: float = 1.0
    v_scale: float = 1.0


def attention_layers(model: Any, pool: Any) -> list[Any]:
    """SGLang's attention layers whose K and V ``pool`` holds, in order."""
    from sglang.srt.layers.radix_attention import RadixAttention

    modules = (m for m in model.modules() if isinstance(m, RadixAttention))
    layers = {module.layer_id: module for module in modules}
    return [layers[pool.start_layer + i] for i in range(pool.layer_num)]


def layer_scales(model: Any, pool: Any) -> list[Scales]:
    """The scales of each layer of ``pool``; 1 unless its pages are of 8 bits.

    Raises ValueError for a scale that is not a positive number.
    """
    if pool.dtype not in FP8_DTYPES:
        return [Scales()] * int(pool.layer_num)
    return [scales_of(layer) for layer in attention_layers(model, pool)]


def scales_of(layer: Any) -> Scales:
    """The scales of one of SGLang's attention layers.

    A checkpoint's are there as a number beside the tensor; ``--quantization-param-path`` sets the
    tensor's name alone, to a number.
    """
    found = []
    for name in Scales._fields:
        value = getattr(layer, f"{name}_float", None)
        if value is None:
            value = getattr(layer, name, None)
        scale = 1.0 if value is None else float(value)
        if not 0 < scale < math.inf:
            raise ValueError(
                f"{name} of layer {layer.layer_id} is {scale}: the scales of an 8-bit KV cache "
                "must be positive"
            )
        found.append(scale)
    return Scales(*found)


# -- on CPUs --


def _choose(original: Callable[..., Any], **kwargs: Any) -> Any:
    """SGLang's choice of a dtype, which refuses e5m2 for its own CPU kernels."""
    options = active_options()
    wanted = kwargs["server_args_kv_cache_dtype"]
    if options is None or not options.active or wanted != "fp8_e5m2":
        return original(**kwargs)
    return None, _FLAGS[wanted]


def _configure(self: Any, **_kwargs: Any) -> None:
    """Before SGLang makes its pools: on CPUs it has e4m3 for its own AMX kernels only.

    The other format stands in, which takes the same room, until `settle` is called.
    """
    options = active_options()
    if options is None or not options.active or self.device != "cpu":
        return
    if self.kv_cache_dtype == torch.float8_e4m3fn and self.kv_cache_dtype_str == "fp8_e4m3":
        self.kv_cache_dtype = torch.float8_e5m2


def settle(configurator: Any) -> None:
    """The dtype that was asked for, when SGLang's pool is about to be made."""
    if configurator.device == "cpu" and configurator.kv_cache_dtype_str in _FLAGS:
        configurator.kv_cache_dtype = _FLAGS[configurator.kv_cache_dtype_str]


HOOKS: list[tuple[str, Callable[..., Any], str]] = [
    ("sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype", _choose, "AROUND"),
    (
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.configure",
        _configure,
        "BEFORE",
    ),
]
