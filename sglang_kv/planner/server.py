"""The plan of a server that is starting: what its pool should take, and what fits in it."""

from __future__ import annotations

from typing import NamedTuple

from sglang_kv.compression import Plan
from sglang_kv.planner.memory import Serving, page_bytes, plan_pages, requests_at_once
from sglang_kv.planner.model import Attention, Model
from sglang_kv.planner.units import PlanError, show_bytes

#: Share by which prediction and allocation may differ before the log warns.
TOLERANCE = 0.01


class ServerPlan(NamedTuple):
    """What the log says. ``pool_bytes`` is what the pool should take, of one device."""

    line: str
    pool_bytes: int

    def warning(self, allocated: int) -> str | None:
        """A line where the pool takes something else; None where it agrees."""
        if abs(allocated - self.pool_bytes) <= TOLERANCE * self.pool_bytes:
            return None
        share = (allocated - self.pool_bytes) / max(self.pool_bytes, 1)
        return (
            f"KV plan: {show_bytes(self.pool_bytes)} predicted and {show_bytes(allocated)} "
            f"allocated ({share:+.1%}): `sglang-kv plan` does not hold for this server"
        )


def server_plan(
    model: Model, serving: Serving, plan: Plan, *, policy: str, pool_tokens: int, prompt: int
) -> ServerPlan:
    """The plan of one device's pool, and of requests of the longest kind in it.

    The server keeps every layer's KV in one pool, windows or not.

    Args:
        model: as its config says.
        serving: the server's settings.
        plan: what the default policy does to a request of ``prompt`` tokens, by the server.
        policy: its name.
        pool_tokens: tokens of full KV that the pool holds.
        prompt: tokens of the request.

    Raises:
        PlanError: the model keeps something else than K and V.
    """
    layers = [layer for layer in model.caches if isinstance(layer, Attention)]
    if model.states or len(layers) < len(model.caches):
        raise PlanError(f"{model.name}: keeps more than K and V")
    streams = plan.geometry.num_streams
    page = page_bytes(layers[0], serving)
    steady, peak = plan_pages(plan, prompt, 0, serving.chunk)
    pages = pool_tokens // serving.page_size * streams
    fit = requests_at_once(pages, steady, peak)
    pool = pool_tokens // serving.page_size * len(layers) * plan.geometry.num_kv_heads * page
    token = len(layers) * plan.geometry.num_kv_heads * page / serving.page_size
    line = (
        f"KV plan: {show_bytes(token)} per token, {show_bytes(pool)} for {pool_tokens:,} tokens. "
        f"A request of {prompt:,} tokens with policy {policy} takes {show_bytes(steady * page)}, "
        f"{show_bytes(max(steady, peak) * page)} while it prefills; {fit} fit at once"
    )
    return ServerPlan(line, pool)
