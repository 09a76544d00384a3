"""Settings that compression needs, and start-up refusals of what it cannot serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_kv.config import Options
from sglang_kv.kernel_paths import AUTO, BACKENDS
from sglang_kv.radix.orders import ORDERS

#: The prefix cache; and the attention backend that picks its kernels by device.
BACKEND = AUTO
#: Token pages of 16: 4 KiB of K and V at head_dim 64 in bf16, one page of memory to fetch.
DEFAULT_PAGE_SIZE = 16
#: Which prefixes go first where the operator does not say.
DEFAULT_ORDER = "importance"
#: Values of ``--kv-cache-dtype`` that head pages can be in.
KV_CACHE_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")

_COMBINED = "--kv-compression cannot be combined with: "

_options: Options | None = None


def active_options() -> Options | None:
    """This process's options, once SGLang's arguments are known."""
    if _options is None:
        from sglang.srt.runtime_context import get_context

        try:
            server_args = get_context().server_args
        except ValueError:  # not published yet
            return None
        activate(Options.of(server_args))
    return _options


def activate(options: Options) -> None:
    global _options
    _options = options


def fill_defaults(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step: what the operator left open takes the values compression needs."""
    options = Options.of(server_args)
    activate(options)
    if options.active:
        from sglang.srt.arg_groups.model_override_base import resolving_view
        from sglang.srt.arg_groups.overrides import declare_resolution

        from sglang_kv.plugin import verify

        verify()
        view = resolving_view(server_args)
        if view.speculative_algorithm is not None:
            # SGLang's checks of it come before ours, and would blame settings that we made.
            raise ValueError(_COMBINED + "speculative decoding")
        wanted: dict[str, Any] = {}
        if view.attention_backend is None:
            wanted["attention_backend"] = BACKEND
        if view.radix_cache_backend is None:
            wanted["radix_cache_backend"] = BACKEND
        if not view._radix_eviction_policy_explicitly_set:  # noqa: SLF001  # the value is "lru"
            wanted["radix_eviction_policy"] = DEFAULT_ORDER
        if view.page_size is None:
            wanted["page_size"] = DEFAULT_PAGE_SIZE
        if wanted:
            declare_resolution(server_args, "sglang_kv", **wanted)
        # Children that are started without these arguments still find the options.
        options.attach(server_args)
    previous(server_args)
    if options.active:
        _size_pools_once(server_args)


def _size_pools_once(server_args: Any) -> None:
    """No pools that are sized anew after graphs are captured: head pages are one tensor, made once.

    Before SGLang divides the GPU's memory, where it would leave out what graphs take.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.environ import envs

    if resolving_view(server_args).device == "cuda":
        envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.set(False)


def settle_gpu(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step: what a GPU would do behind the ledger's back is turned off."""
    previous(server_args)
    if not Options.of(server_args).active:
        return
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.environ import envs
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    view = resolving_view(server_args)
    if view.device != "cuda":
        return
    # It would record what the host has to do before each replay.
    envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.set(False)
    if view.cuda_graph_config is not None:  # a prefill's launches follow from its batch
        graphs = with_phase(view.cuda_graph_config, Phase.PREFILL, backend=Backend.DISABLED)
        declare_resolution(server_args, "sglang_kv", cuda_graph_config=graphs)


def refuse_unsupported(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step: stop with one clear message for each setting that would go wrong."""
    previous(server_args)
    options = Options.of(server_args)
    if not options.active:
        return
    from sglang.srt.arg_groups.model_override_base import resolving_view

    problems = _problems(resolving_view(server_args))
    if problems:
        raise ValueError(_COMBINED + "; ".join(problems))


def _problems(args: Any) -> list[str]:
    checks: list[tuple[bool, str]] = [
        (
            args.device not in ("cpu", "cuda"),
            f"--device {args.device} (there are kernels for cpu, with SGLANG_USE_CPU_ENGINE=1, "
            "and for cuda)",
        ),
        (
            args.attention_backend not in BACKENDS,
            f"--attention-backend {args.attention_backend} (leave it out)",
        ),
        (
            args.prefill_attention_backend not in (None, args.attention_backend)
            or args.decode_attention_backend not in (None, args.attention_backend),
            "--prefill-attention-backend/--decode-attention-backend (leave them out)",
        ),
        (
            args.radix_cache_backend != BACKEND,
            f"--radix-cache-backend {args.radix_cache_backend} (leave it out)",
        ),
        (
            args.radix_eviction_policy not in ORDERS,
            f"--radix-eviction-policy {args.radix_eviction_policy} (there are {', '.join(ORDERS)})",
        ),
        (args.disaggregation_mode != "null", "prefill/decode disaggregation"),
        (args.enable_hierarchical_cache, "--enable-hierarchical-cache"),
        (args.enable_lmcache, "--enable-lmcache"),
        (args.enable_mixed_chunk, "--enable-mixed-chunk"),
        (args.enable_dp_attention, "--enable-dp-attention"),
        (args.pp_size > 1, "pipeline parallelism"),
        (getattr(args, "attn_cp_size", 1) > 1, "context parallelism"),
        (getattr(args, "dcp_size", 1) > 1, "decode context parallelism"),
        (bool(getattr(args, "enable_streaming_session", False)), "streaming sessions"),
        (bool(getattr(args, "enable_session_radix_cache", False)), "session radix caches"),
        (args.is_embedding, "embedding models"),
        (args.enable_torch_compile, "--enable-torch-compile"),
        (
            args.kv_cache_dtype not in KV_CACHE_DTYPES,
            f"--kv-cache-dtype {args.kv_cache_dtype} (there are {', '.join(KV_CACHE_DTYPES)})",
        ),
        (args.tokenizer_worker_num > 1, "--tokenizer-worker-num above 1"),
        (
            args.page_size is not None and args.page_size not in (1, 16, 32),
            f"--page-size {args.page_size} (1, 16 and 32 are supported)",
        ),
    ]
    return [message for bad, message in checks if bad]
