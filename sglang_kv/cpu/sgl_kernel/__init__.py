"""Stand-in for `sgl_kernel` on a CPU: the names that SGLang 0.5.23 imports whenever it runs there.

SGLang's plain paths for a CPU never call them. The list is closed, so that a feature which SGLang
detects by trying an import is still found missing, and no `torch.ops.sgl_kernel` is registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

OPS = frozenset(
    {
        "assign_draft_cache_locs_contiguous_cpu",
        "assign_extend_cache_locs_cpu",
        "assign_req_to_token_pool_cpu",
        "build_tree_kernel_efficient_cpu",
        "copy_all_layer_kv_cache_cpu",
        "fill_accept_out_cache_loc_cpu",
        "fill_bonus_tokens_cpu",
        "rotate_input_ids_cpu",
        "verify_tree_greedy_cpu",
    }
)


def missing_op(module: str, name: str) -> Callable[..., NoReturn]:
    def op(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"{module}.{name} was called, but this is sglang-kv's stand-in for sgl_kernel on a "
            "CPU, which carries no kernels. The feature in use needs a GPU, or SGLang's own "
            "sgl_kernel built for CPU."
        )

    op.__name__ = op.__qualname__ = name
    op.__module__ = module
    return op


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name in OPS:
        return missing_op(__name__, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
