"""What is hooked into SGLang, and where. Each hook does nothing unless compression is on."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from sglang_kv import kv_dtypes, runtime
from sglang_kv.admission import check_request, gated_adder
from sglang_kv.capacity import log_plan
from sglang_kv.compression import Geometry, PolicyError, parse_policy
from sglang_kv.compression.base import shorten
from sglang_kv.compression.gates import HeadGates, find_gates, load_gates, require_model
from sglang_kv.config import (
    PREFIX_KEY,
    PRESSURE_KEY,
    REQUEST_KEY,
    REQUEST_KEYS,
    Options,
    refuse_unknown,
)
from sglang_kv.flags import add_flags, options_from_flags
from sglang_kv.fold import Folder
from sglang_kv.kvcache import HeadPageKVPool
from sglang_kv.ledger import LedgerAllocator
from sglang_kv.namespaces import Sharing, rotary_identity
from sglang_kv.owner import crossover
from sglang_kv.pool import HeadPagePool
from sglang_kv.pressure import Pressure
from sglang_kv.request import RequestState
from sglang_kv.rotary import trained_length
from sglang_kv.startup import DEFAULT_ORDER, active_options
from sglang_kv.state import PhysicalLedger
from sglang_kv.tenants import read_tenant, refuse_forged
from sglang_kv.thinning import Thinner, require_need, thinning_plan

# -- flags and intake, in the server's main process --


def _add_cli_args(_result: None, parser: argparse.ArgumentParser) -> None:
    add_flags(parser)


def _from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    try:
        options = options_from_flags(args)
    except (PolicyError, OSError) as error:
        raise SystemExit(f"sglang-kv: {error}") from None
    server_args = original(cls, args)
    options.attach(server_args)
    return server_args


def _verify(params: Any, *_args: Any, **_kwargs: Any) -> None:
    """Refuse a bad policy where SGLang refuses bad sampling parameters: HTTP 400."""
    custom_params = params.custom_params or {}
    if not isinstance(custom_params, dict):
        raise PolicyError(f"custom_params: expected an object, got {shorten(custom_params)}")
    refuse_forged(custom_params)
    options = active_options()
    active = options is not None and options.active
    if active and (params.beam_width or 1) > 1:
        # Beams swap rows of SGLang's table, of which the head pages know nothing.
        raise PolicyError("beam_width: beam search cannot be had with --kv-compression")
    if active:
        refuse_unknown(custom_params)
    wanted = [key for key in REQUEST_KEYS if custom_params.get(key) is not None]
    if not wanted:
        return
    if options is None or not options.active:
        raise PolicyError(
            f"{wanted[0]}: this server was started without --kv-compression, so no policy can be "
            "applied"
        )
    options.policy_for(custom_params.get(REQUEST_KEY))
    options.evictable(custom_params.get(PRESSURE_KEY))
    options.takes_thinned(custom_params.get(PREFIX_KEY))


# -- pools, in the scheduler's process --


def _build_mha_kv_pool(self: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    options = active_options()
    if options is None or not options.active:
        return None
    kv_dtypes.settle(self)
    return (self,), {**kwargs, "mha_pool_class": HeadPageKVPool}


def _build_allocator(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    pool = kwargs["token_to_kv_pool"]
    options = active_options()
    if options is None or not options.active:
        return original(self, **kwargs)
    if not isinstance(pool, HeadPageKVPool):
        raise RuntimeError(
            f"sglang-kv cannot serve this model: SGLang built a {type(pool).__name__}, and "
            "only models with one ordinary KV pool are supported"
        )
    context = int(self.model_config.context_len)
    tokens = options.virtual_tokens or max(8 * pool.size, 4 * context)
    # Fewer virtual tokens than real ones would leave memory that nothing can name.
    tokens = max(tokens, pool.size)
    return LedgerAllocator(
        tokens // pool.page_size * pool.page_size,
        page_size=pool.page_size,
        dtype=self.kv_cache_dtype,
        device=self.device,
        kvcache=pool,
        need_sort=False,
    )


def _configure(result: Any, self: Any, **_kwargs: Any) -> None:
    options = active_options()
    if options is None or not options.active:
        return
    from sglang.srt.runtime_context import get_parallel, get_schedule

    pool: HeadPageKVPool = result.token_to_kv_pool
    allocator: LedgerAllocator = result.token_to_kv_pool_allocator
    chunk = get_schedule().chunked_prefill_size
    geometry = Geometry(
        num_layers=pool.layer_num,
        num_kv_heads=pool.head_num,
        page_size=pool.page_size,
        gates=_gates(options, self.model_config),
        heads=_heads_of_rank(self.model_config, pool.head_num),
        sliding_layers=self.model_config.sliding_window_size is not None,
        num_ranks=get_parallel().tp_size,
    )
    trained = trained_length(self.model_config.hf_text_config)
    longer = int(self.model_config.context_len) > trained
    options.check_default(geometry)  # one that cannot be had stops the server here
    ledger = PhysicalLedger(
        HeadPagePool(pool.num_head_pages),
        geometry,
        Folder(pool.pages, geometry),
        num_token_pages=allocator.num_pages,
        page_bytes=pool.page_bytes,
        req_to_token=result.req_to_token_pool.req_to_token,
        chunk_tokens=chunk if chunk and chunk > 0 else None,
        trained_length=trained if longer else None,
    )
    if options.pressure == "evict":
        geometry.require_even("--kv-pressure evict")
        ledger.pressure = Pressure(options.pressure_floor, options.min_keep)
    assert ledger.dense_capacity == allocator.available_size(), "SGLang's leak check needs this"
    allocator.ledger = ledger
    result.req_to_token_pool.attach_aux_cache(ledger)
    sharing = Sharing(
        options.prefix_sharing,
        model=f"{self.model_config.model_path}@{self.model_config.revision}",
        rotary=rotary_identity(self.model_config.hf_text_config),
    )
    runtime.install(
        runtime.Runtime(
            options,
            ledger,
            sharing,
            crossover(self.model_config),
            measures=_measures(options, geometry),
            thinner=_thinner(options, ledger),
        )
    )
    log_plan(ledger, pool, options.default_policy, self.model_config)


def _measures(options: Options, geometry: Geometry) -> bool:
    """Whether prompts say what they were worth: somebody asks, and ranks would say the same."""
    from sglang.srt.runtime_context import get_memory

    memory = get_memory()
    asked = memory.radix_eviction_policy == DEFAULT_ORDER and not memory.disable_radix_cache
    shared = asked and options.prefix_sharing != "off"
    # A rank sees its own heads; a tree that differed from its neighbours' would hang the group.
    return shared and geometry.num_ranks == 1 and not geometry.sliding_layers


def _thinner(options: Options, ledger: PhysicalLedger) -> Thinner | None:
    if not options.prefix_thinning:
        return None
    return Thinner.of(ledger, thinning_plan(ledger.geometry, options.default_policy))


def _gates(options: Options, model_config: Any) -> HeadGates | None:
    """The operator's gates, else those that are found for the model."""
    layers, heads = model_config.num_hidden_layers, model_config.get_total_num_kv_heads()
    if options.gates is None:
        return find_gates(model_config.model_path, layers, heads)
    gates = load_gates(options.gates)
    require_model(gates, model_config.model_path, layers, heads)
    return gates


def _heads_of_rank(model_config: Any, num_heads: int) -> slice:
    """The KV heads of the model that this rank of a tensor-parallel group holds."""
    from sglang.srt.runtime_context import get_parallel

    parallel, total = get_parallel(), model_config.get_total_num_kv_heads()
    # Where ranks outnumber heads, neighbours hold the same one.
    first = parallel.tp_rank * total // parallel.tp_size
    return slice(first, first + num_heads)


def _alloc_rows(result: list[int] | None, _self: Any, reqs: list[Any]) -> None:
    current = runtime.current()
    if current is not None and result is not None:
        for req in reqs:
            current.ledger.bind(req)


# -- the scheduler --


def _create_generation_req(req: Any, _self: Any, recv_req: Any, *_args: Any, **_kw: Any) -> None:
    current = runtime.current()
    if current is None:
        return
    params = getattr(recv_req.sampling_params, "custom_params", None) or {}
    options, spec = current.options, params.get(REQUEST_KEY)
    geometry, tokens = current.ledger.geometry, len(req.origin_input_ids)
    overridden, evictable, need = False, False, None
    try:
        # The HTTP side checks first; requests that skip it (gRPC) are refused here.
        policy, overridden = options.policy_for(spec)
        thinned = options.takes_thinned(params.get(PREFIX_KEY))
        # What only this process knows: the prompt's length, the model's shape and its gates.
        plan = policy.plan(tokens, geometry)
        options.check_kept(policy, plan, None if options.override == "server" else spec)
        # One that was overridden did not ask for a policy that pressure takes nothing from.
        evictable = options.evictable(params.get(PRESSURE_KEY), None if overridden else plan)
        need = require_need(plan) if thinned else None
    except PolicyError as error:
        policy = parse_policy("none")
        plan = policy.plan(tokens, geometry)
        req.set_finish_with_abort(str(error))
    # Window scores are attention to every token, which sliding layers do not give.
    evictable = evictable and not geometry.sliding_layers
    tenant = read_tenant(current.options, params)
    req.sglang_kv = RequestState(
        req,
        policy,
        plan,
        overridden=overridden,
        evictable=evictable,
        tenant=tenant,
        measures=current.measures,
        need=need,
    )


def _init_req_max_new_tokens(_result: None, _self: Any, req: Any) -> None:
    current = runtime.current()
    if current is None or req.to_finish is not None:
        return
    refusal = current.refusal(req.sglang_kv.plan) or check_request(current.ledger, req)
    if refusal is not None:
        req.set_finish_with_abort(refusal)


def _get_prefill_adder_class(result: Any, _self: Any) -> Any:
    current = runtime.current()
    return None if current is None else gated_adder(result, current.ledger)


def _run_batch(_result: Any, self: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    current = runtime.current()
    if current is None:
        return
    ledger = current.ledger
    ledger.folder.forward_stream = self.forward_stream
    if batch.forward_mode.is_extend():
        ledger.after_prefill(batch.reqs)
    if ledger.take_freed():
        # Set when the last admission failed; SGLang clears it only when a request leaves.
        self.running_batch.batch_is_full = False
        batch.batch_is_full = False


def _init_new(result: Any, _cls: type, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """A batch's rows as the host knows them: the forward has them on the device only. A replayed
    graph sees another object than this batch, and takes them from the runtime."""
    rows = getattr(batch, "req_pool_indices_cpu", None)
    if runtime.current() is not None and rows is not None:
        result.sglang_kv_rows = rows.numpy()
        runtime.announce_rows(result.sglang_kv_rows)


def _can_run_graph(result: bool, self: Any, *_args: Any, **_kwargs: Any) -> bool | None:
    if not result or runtime.current() is None:
        return None
    serves: bool = self.attn_backend.graph_serves()
    return serves


def _enable_fused_set_kv_buffer(original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    # A fused writer would store K and V past the head pages.
    return original(*args, **kwargs) if runtime.current() is None else False


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"

_FORWARD_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
_GRAPH_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"

HOOKS: list[tuple[str, Callable[..., Any], str]] = [
    (f"{_FORWARD_BATCH}.init_new", _init_new, "AFTER"),
    ("sglang.srt.server_args.ServerArgs.add_cli_args", _add_cli_args, "AFTER"),
    ("sglang.srt.server_args.ServerArgs.from_cli_args", _from_cli_args, "AROUND"),
    ("sglang.srt.sampling.sampling_params.SamplingParams.verify", _verify, "BEFORE"),
    (f"{_CONFIGURATOR}._build_mha_kv_pool", _build_mha_kv_pool, "BEFORE"),
    (f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator", _build_allocator, "AROUND"),
    (f"{_CONFIGURATOR}.configure", _configure, "AFTER"),
    ("sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc", _alloc_rows, "AFTER"),
    (f"{_SCHEDULER}._create_generation_req", _create_generation_req, "AFTER"),
    (f"{_SCHEDULER}.init_req_max_new_tokens", _init_req_max_new_tokens, "AFTER"),
    (f"{_SCHEDULER}.get_prefill_adder_class", _get_prefill_adder_class, "AFTER"),
    (f"{_SCHEDULER}.run_batch", _run_batch, "AFTER"),
    (
        "sglang.srt.models.utils.enable_fused_set_kv_buffer",
        _enable_fused_set_kv_buffer,
        "AROUND",
    ),
]

#: Of machines with an NVIDIA GPU.
GPU_HOOKS: list[tuple[str, Callable[..., Any], str]] = [
    (f"{_GRAPH_RUNNER}.can_run_graph", _can_run_graph, "AFTER"),
]
