"""The command that serves what was planned, and what it would not do."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from sglang_kv.compression import Compressor

if TYPE_CHECKING:
    from sglang_kv.planner.capacity import CapacityPlan

#: SGLang's names for KV dtypes.
_KV_FLAGS = {"fp8": "fp8_e4m3", "fp4": "fp4_e2m1"}
#: What this version's server takes, with --kv-compression.
_PAGE_SIZES = (1, 16, 32)
_KV_DTYPES = ("bf16", "fp16", "fp8")


def serve_command(plan: CapacityPlan) -> str | None:
    """``sglang serve`` with the flags that the plan stands for; None where not one request fits."""
    serving, policy, fits = plan.serving, plan.policy, plan.fits
    running = plan.requests
    if fits is not None:
        if fits.requests == 0:
            return None
        running = min(running, fits.requests) if running > 1 else fits.requests
    words = ["sglang", "serve", "--model-path", plan.model.path or plan.model.name]
    words += ["--context-length", str(plan.tokens), "--page-size", str(serving.page_size)]
    if serving.tp_size > 1:
        words += ["--tp-size", str(serving.tp_size)]
    if serving.kv_dtype in _KV_FLAGS:
        words += ["--kv-cache-dtype", _KV_FLAGS[serving.kv_dtype]]
    if serving.chunk is not None:
        words += ["--chunked-prefill-size", str(serving.chunk)]
    words += ["--max-running-requests", str(running)]
    pool = pool_tokens(plan, running)
    if pool is not None:
        words += ["--max-total-tokens", str(pool)]
    if policy.name != "none":
        words += ["--kv-compression", policy.name]
        changed = changed_parameters(policy)
        if changed:
            words += ["--kv-compression-config", json.dumps(changed)]
        if plan.assumed:
            words += ["--kv-gates", "GATES.json"]
    return shlex.join(words)


def pool_tokens(plan: CapacityPlan, running: int) -> int | None:
    """Tokens of full KV whose memory so many requests need; None where layers differ in what
    they keep, and SGLang sizes more than one pool."""
    model, size = plan.model, plan.serving.page_size
    if model.sliding or model.latent or model.states:
        return None
    need = plan.need
    pages = (running - 1) * need.pages + max(need.peak_pages, need.pages)
    full = -(-plan.tokens // size)
    streams = len(model.full) * max(1, model.full[0].kv_heads // plan.serving.tp_size)
    # Never less than one whole request, which SGLang wants to fit.
    return max(-(-pages // streams), full) * size if pages else None


def changed_parameters(policy: Compressor) -> dict[str, Any]:
    """Parameters that differ from the method's defaults, as a client would give them."""
    default = type(policy)()
    # None is what a parameter becomes when another stands in its place.
    return {
        key: value
        for key, value in policy.parameters.items()
        if value is not None and value != getattr(default, key)
    }


def cautions(plan: CapacityPlan) -> list[str]:
    """What the plan takes for granted and a server of today does not do."""
    found, serving, model = [], plan.serving, plan.model
    if serving.kv_dtype == "int8":
        found.append("SGLang has no int8 KV cache")
    if plan.policy.name != "none":
        if serving.page_size not in _PAGE_SIZES:
            found.append("with --kv-compression, pages are of 1, 16 or 32 tokens")
        if serving.kv_dtype not in _KV_DTYPES:
            found.append("with --kv-compression, the KV cache is in the model's 16 bits, or in fp8")
        if model.states or model.sliding or model.latent:
            found.append("with --kv-compression, this version serves models of full attention only")
    if plan.assumed:
        found.append("gates are assumed; the server needs real ones (--kv-gates)")
    if model.context is not None and plan.tokens > model.context:
        found.append(
            f"{plan.tokens:,} tokens are more than the {model.context:,} positions the model has"
        )
    if serving.kv_dtype not in ("bf16", "fp16") and model.states:
        found.append("the states keep their dtype, whatever the KV cache's is")
    return found
