"""The arithmetic: what one request holds on one device, and how many requests fit.

What a policy keeps is its own `Plan`'s to say, the very object that the server's ledger obeys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from sglang_kv.compression import Compressor, Geometry, Plan
from sglang_kv.compression.gates import HeadGates, find_gates
from sglang_kv.planner.model import Attention, Model, shard, shard_or_copy
from sglang_kv.planner.units import PlanError, check_count, element_bytes

#: K and V of a head page each start at a multiple of so many bytes (``kernels/layout.py``).
ALIGNMENT = 128
#: KV dtypes that this project's head pages come in.
PAGED_DTYPES = ("bf16", "fp16", "fp8")


@dataclass(frozen=True)
class Serving:
    """How a model is served.

    Args:
        kv_dtype: of the cache.
        state_dtype: of recurrent states; None: what the model's config says, else fp32.
        page_size: tokens per page.
        tp_size: devices of a tensor-parallel group.
        chunk: most tokens of a prompt in one forward; None: the whole prompt.
    """

    kv_dtype: str = "bf16"
    state_dtype: str | None = None
    page_size: int = 16
    tp_size: int = 1
    chunk: int | None = 8192

    def __post_init__(self) -> None:
        check_count("--page-size", self.page_size, most=2**16)
        check_count("--tp-size", self.tp_size, most=2**16)
        if self.chunk is not None:
            check_count("--chunk", self.chunk)


@dataclass(frozen=True)
class Need:
    """Bytes that one request holds on one device.

    Args:
        kv: K and V (or latents) between two steps, all layers.
        kv_peak: most that its prefill takes at once.
        state: matrices of recurrent layers, constant at any length.
        convolution: what their short convolutions remember.
        pages: head pages of the layers that the policy acts on.
        peak_pages: the same at the prefill's peak.
        kept_tokens: of the prompt and answer, per head of those layers, in the mean.
    """

    kv: int
    kv_peak: int
    state: int
    convolution: int
    pages: int
    peak_pages: int
    kept_tokens: int

    @property
    def fixed(self) -> int:
        return self.state + self.convolution

    @property
    def steady(self) -> int:
        return self.kv + self.fixed

    @property
    def peak(self) -> int:
        return max(self.kv, self.kv_peak) + self.fixed


def request_need(
    model: Model,
    policy: Compressor,
    serving: Serving,
    prompt: int,
    new: int = 0,
    gates: HeadGates | None = None,
) -> Need:
    """What a request with ``prompt`` and ``new`` decoded tokens holds on one device.

    Raises:
        PlanError: such a plan cannot be made; also `PolicyError`, from the policy.
    """
    check_count("--context", prompt)
    check_count("--new-tokens", new, least=0)
    check_count("--context", prompt + new)
    size, tokens = serving.page_size, prompt + new
    plan = policy_plan(model, policy, serving, prompt, gates)
    pages, peak = plan_pages(plan, prompt, new, serving.chunk) if plan is not None else (0, 0)
    page = page_bytes(model.full[0], serving) if model.full else 0
    others = sum(_window_bytes(layer, serving, tokens) for layer in model.sliding)
    peaks = sum(
        _window_bytes(layer, serving, prompt, serving.chunk or prompt) for layer in model.sliding
    )
    for layer in model.latent:  # on every device of a group
        shard("query heads", layer.query_heads, serving.tp_size)
        held = -(-tokens // size) * size * element_bytes(layer.values, serving.kv_dtype)
        others, peaks = others + held, peaks + held
    dtype = serving.state_dtype or model.state_dtype
    return Need(
        kv=pages * page + others,
        kv_peak=peak * page + peaks,
        state=sum(element_bytes(s.matrix(serving.tp_size), dtype) for s in model.states),
        # SGLang keeps it in 16 bits whatever the state's dtype is.
        convolution=sum(
            element_bytes(s.convolution(serving.tp_size), "bf16") for s in model.states
        ),
        pages=pages,
        peak_pages=peak,
        kept_tokens=plan.kept_tokens(tokens) if plan is not None else tokens,
    )


def policy_plan(
    model: Model, policy: Compressor, serving: Serving, prompt: int, gates: HeadGates | None
) -> Plan | None:
    """What the policy does to the layers that keep every token; None where there are none."""
    full = model.full
    check_compressible(model, policy)
    if not full:
        return None
    if len(set(full)) > 1:
        raise PlanError(f"{model.name}: its full-attention layers differ, which is not supported")
    return policy.plan(prompt, geometry(model, serving, gates))


def check_compressible(model: Model, policy: Compressor) -> None:
    """`PlanError` where the model has no layer that the policy could drop anything from."""
    if policy.name != "none" and not model.full:
        why = "one latent per token and layer (MLA)" if model.latent else "a window in every layer"
        raise PlanError(f"--method {policy.name}: {model.name} keeps {why}, with nothing to drop")


def geometry(model: Model, serving: Serving, gates: HeadGates | None) -> Geometry:
    """The streams of one request on one device, in the layers that keep every token."""
    heads = shard_or_copy("KV heads", model.full[0].kv_heads, serving.tp_size)
    shard("query heads", model.full[0].query_heads, serving.tp_size)
    if gates is not None:
        wanted = (len(model.full), model.full[0].kv_heads)
        if gates.values.shape != wanted:
            raise PlanError(
                f"--gates: {gates.source} holds gates of {gates.values.shape[0]} layers x "
                f"{gates.values.shape[1]} KV heads, {model.name} has {wanted[0]} x {wanted[1]}"
            )
    return Geometry(
        num_layers=len(model.full),
        num_kv_heads=heads,
        page_size=serving.page_size,
        gates=gates,
        heads=slice(0, heads),
        sliding_layers=bool(model.sliding),
        num_ranks=serving.tp_size,
    )


def plan_pages(plan: Plan, prompt: int, new: int, chunk: int | None) -> tuple[int, int]:
    """Head pages of one request: at its end, and at its prefill's peak.

    The prefix tree takes over what a policy leaves dense, so that counts towards the peak.
    """
    published = (plan.dense_prefix or 0) // plan.geometry.page_size
    return plan.pages(prompt + new), plan.peak_pages(prompt, chunk, published=published)


def requests_at_once(room: int, steady: int, peak: int) -> int:
    """Requests that fit in ``room``, the newest one still at its prefill's peak.

    All three in bytes, or all in pages.
    """
    return max(0, (room - max(peak, steady)) // steady + 1)


def page_bytes(layer: Attention, serving: Serving) -> int:
    """Bytes of one head page: K and V of ``page_size`` tokens of one KV head of one layer."""
    size = serving.page_size
    halves = [
        element_bytes(size * dim, serving.kv_dtype) for dim in (layer.head_dim, layer.value_dim)
    ]
    if serving.kv_dtype in PAGED_DTYPES:
        halves = [-(-half // ALIGNMENT) * ALIGNMENT for half in halves]
    return sum(halves)


def _window_bytes(layer: Attention, serving: Serving, tokens: int, chunk: int = 0) -> int:
    """Bytes of a sliding-window layer: min(tokens, window), and at most a chunk beside it."""
    assert layer.window is not None
    held = -(-min(tokens, layer.window + chunk) // serving.page_size)
    heads = shard_or_copy("KV heads", layer.kv_heads, serving.tp_size)
    shard("query heads", layer.query_heads, serving.tp_size)
    return held * heads * page_bytes(layer, serving)


def token_bytes(layers: Iterable[Any], kv_dtype: str) -> int:
    """Bytes that one more token takes in such layers of the whole model, without page rounding."""
    return sum(element_bytes(layer.values, kv_dtype) for layer in layers)


def weight_bytes(model: Model, dtype: str | None = None) -> int | None:
    """Bytes of the weights in ``dtype`` (None: the checkpoint's); None: not known."""
    dtype = dtype or model.weight_dtype or model.dtype
    if model.parameters is None or dtype == "unknown":
        return None
    return element_bytes(model.parameters, dtype)


def model_gates(model: Model) -> HeadGates | None:
    """Gates that come with the package for a model of that name and shape."""
    if not model.full:
        return None
    for name in (model.path, model.name):
        gates = find_gates(name, len(model.full), model.full[0].kv_heads) if name else None
        if gates is not None:
            return gates
    return None


def assumed_gates(model: Model) -> HeadGates:
    """Gates that say nothing about any head: how many stream is the policy's to say.

    Every streaming head holds as much as any other, so which ones they are changes no sum.
    """
    import numpy as np

    shape = (len(model.full), model.full[0].kv_heads) if model.full else (1, 1)
    return HeadGates(
        np.zeros(shape, np.float32), model=model.name, method="assumed", source="--assume-sparsity"
    )


def with_kv_heads(model: Model, heads: int) -> Model:
    """The model as if its full-attention layers had so many KV heads."""
    caches = tuple(
        replace(c, kv_heads=heads) if isinstance(c, Attention) else c for c in model.caches
    )
    return replace(model, caches=caches)
