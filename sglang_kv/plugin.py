"""The entry point: registers everything with SGLang, and proves that it took.

SGLang logs what goes wrong in a plugin and serves on, uncompressed. So a failure here
raises ``SystemExit``, which its loader lets through, and `verify` runs again wherever
compression is about to be used.
"""

from __future__ import annotations

import traceback
from functools import partial
from typing import Any, NoReturn

from sglang_kv import startup
from sglang_kv.kernel_paths import BACKENDS
from sglang_kv.startup import BACKEND

SGLANG_VERSION = "0.5.23"


def register() -> None:
    """SGLang's plugin loader calls this in every process it starts."""
    try:
        _register()
    except Exception:  # a half-installed plugin must not serve
        traceback.print_exc()
        _stop("the plugin failed to install (see the traceback above)")


def _register() -> None:
    import sglang
    from sglang.srt.arg_groups.choices import (
        RADIX_EVICTION_POLICY_CHOICES,
        add_attention_backend_choices,
        add_radix_eviction_policy_choices,
    )
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_kv.radix.orders import ORDERS

    if sglang.__version__ != SGLANG_VERSION:
        _stop(f"needs sglang=={SGLANG_VERSION}, found {sglang.__version__}")
    for target, hook, kind in _all_hooks():
        HookRegistry.register(target, hook, HookType[kind])
    add_attention_backend_choices(list(BACKENDS))
    add_radix_eviction_policy_choices(
        [name for name in ORDERS if name not in RADIX_EVICTION_POLICY_CHOICES]
    )
    for name in BACKENDS:
        register_attention_backend(name)(partial(_attention_backend, name))
    register_radix_cache_backend(BACKEND, _tree_cache)
    register_resolution_hook("handle_missing_default_values")(startup.fill_defaults)
    register_resolution_hook("handle_attention_backend_compatibility")(startup.settle_gpu)
    register_resolution_hook("handle_other_validations")(startup.refuse_unsupported)


def _all_hooks() -> list[tuple[str, Any, str]]:
    import torch

    from sglang_kv import fused, hooks, kv_dtypes, metrics, prefix_metrics, report, tenants

    modules = (hooks, report, metrics, prefix_metrics, fused, tenants, kv_dtypes)
    of_gpus = hooks.GPU_HOOKS if torch.cuda.is_available() else []
    return [*(hook for module in modules for hook in module.HOOKS), *of_gpus]


def verify() -> None:
    """Stop this process unless every hook and registration is in place."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache.registry import get_radix_cache_factory
    from sglang.srt.plugins.hook_registry import HookRegistry

    # SGLang keeps no public list of the hooks it applied; a failed one is only logged.
    patched = HookRegistry._patched  # noqa: SLF001
    missing = [target for target, _, _ in _all_hooks() if target not in patched]
    if not set(BACKENDS) <= set(ATTENTION_BACKENDS):
        missing.append("attention backend registration")
    if get_radix_cache_factory(BACKEND) is None:
        missing.append("radix cache registration")
    if missing:
        _stop(f"not installed: {', '.join(missing)}")


def _attention_backend(name: str, model_runner: Any) -> Any:
    from sglang_kv.backend import make_backend

    verify()
    return make_backend(name, model_runner)


def _tree_cache(context: Any) -> Any:
    from sglang_kv import runtime
    from sglang_kv.prefix_cache import HeadPageRadixCache

    verify()
    current = runtime.current()
    if current is None:
        _stop(f"--radix-cache-backend {BACKEND} needs --kv-compression METHOD")
    return HeadPageRadixCache(
        context.params,
        current.ledger,
        sharing=current.sharing,
        crossover=current.crossover,
        thinner=current.thinner,
    )


def _stop(reason: str) -> NoReturn:
    raise SystemExit(f"sglang-kv: {reason}; the server stops rather than serve uncompressed")
