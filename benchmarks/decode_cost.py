"""What a decode step on a GPU has to move, and how near to its memory's limit that may come.

    python benchmarks/decode_cost.py

Arithmetic, no measurement: bytes from `sglang_kv.planner`, tiles as the FlashInfer path cuts them,
bandwidths from data sheets, and two constants, named below, for what launches and empty SMs cost.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.compression import FoldPlan, Plan, WindowPlan, parse_policy
from sglang_kv.planner.find import find_model
from sglang_kv.planner.memory import (
    Serving,
    assumed_gates,
    model_gates,
    page_bytes,
    policy_plan,
    weight_bytes,
)

#: Memory bandwidth in bytes/s, and SMs: NVIDIA's data sheets of the SXM cards.
GPUS = {"H100": (3.35e12, 132), "H200": (4.8e12, 132)}
#: Assumed: between two kernels of a CUDA graph nothing is read for this long, in seconds.
LAUNCH_S = 1.5e-6
#: Assumed: of the data sheet's bandwidth a plain copy reaches this share; the limit is the copy.
COPY_SHARE = 0.92
#: Keys of one tile of decode; as `kernels.flashinfer.attention.SPLIT_TOKENS`, which needs torch.
SPLIT_TOKENS = 256
#: Tiles that one SM works on at once.
TILES_PER_SM = 2
POLICIES: tuple[dict[str, object], ...] = (
    {"method": "none"},
    {"method": "snapkv", "budget": 2048},
    {"method": "pyramidkv", "budget": 2048},
    {"method": "h2o", "heavy": 1024, "recent": 1024, "interval": 128},
    {"method": "streamingllm", "sinks": 4, "recent": 2044},
    {"method": "duoattention", "sparsity": 0.5},
)


@dataclass(frozen=True)
class Step:
    """The attention of one decode step, all layers and requests; bytes unless named otherwise."""

    kv: int
    tables: float  # page ids, and the lengths that are uploaded
    partial: int  # results of tiles, written and read again
    rows: int  # queries, outputs, and the new tokens' K and V
    tiles: int  # of all layers
    launches: int  # per layer
    plans: float  # calls of FlashInfer's `plan`, in the mean
    plan_bytes: float  # uploaded by them
    weights: int

    @property
    def moved(self) -> float:
        return self.kv + self.tables + self.partial + self.rows + self.plan_bytes

    def share_of_limit(self, sms: int, bandwidth: float, layers: int) -> float:
        """K and V at a copy's speed, over the time that attention takes."""
        width = TILES_PER_SM * sms
        per_layer = self.tiles / layers
        # The last wave of tiles keeps the others waiting; a tile starts where one ends, so that is
        # half a wave in the mean.
        waves = (per_layer / width + 0.5) / (per_layer / width) if per_layer > width else 1.0
        full = min(1.0, per_layer / width) if per_layer < width else 1.0
        copy = bandwidth * COPY_SHARE
        seconds = self.moved / copy * waves / full + self.launches * layers * LAUNCH_S
        return self.kv / copy / seconds


def step(
    policy_spec: dict[str, object],
    batch: int,
    tokens: int,
    *,
    page_size: int = 16,
    split: int = SPLIT_TOKENS,
) -> Step:
    """One decode step of ``batch`` requests of Llama-3-8B's shape with ``tokens`` tokens each."""
    model, serving = find_model("llama-3.1-8b"), Serving(page_size=page_size)
    layer = model.full[0]
    policy = parse_policy(policy_spec)
    gates = model_gates(model) or assumed_gates(model)
    plan = policy_plan(model, policy, serving, tokens, gates)
    assert plan is not None
    lengths = stream_lengths(plan, tokens)  # [layers, kv_heads]
    sinks, windowed = windows(plan, tokens)
    group = layer.query_heads // layer.kv_heads
    pages = -(-lengths // page_size)
    chunks = -(-lengths // split)
    streams = lengths.size * batch
    entries = streams + int(sinks.sum()) * batch
    tiles = (int(chunks.sum()) + int(sinks.sum())) * batch
    split_tiles = int(chunks[chunks > 1].sum()) * batch
    masks = 1 + int(windowed.any() and bool((~windowed).any() or sinks.any()))
    turned = isinstance(plan, WindowPlan) and plan.cache_positions
    splits = int((chunks > 1).any())
    # Lengths agree between requests of one policy; each is at another place in its page.
    classes = len({(lengths[i].tobytes(), windowed[i].tobytes()) for i in range(len(lengths))})
    crossings = batch / split + (2 * batch / page_size if windowed.any() else 0.0)
    plans = classes * min(1.0, crossings)
    dim, element = layer.head_dim, 2
    return Step(
        kv=int(lengths.sum()) * batch * page_bytes(layer, serving) // page_size,
        tables=4 * int(pages.sum()) * batch + 20 * entries,
        partial=2 * split_tiles * group * (dim + 1) * 4,
        rows=streams * (2 * group + 2) * dim * element,
        tiles=tiles,
        launches=1 + masks + splits + int(sinks.any()) + int(turned),
        plans=plans,
        plan_bytes=plans / classes * tiles * 12,
        weights=weight_bytes(model) or 0,
    )


def stream_lengths(plan: Plan, tokens: int) -> np.ndarray:
    """Tokens that the newest query sees of each stream, ``[layers, kv_heads]``."""
    shape = (plan.geometry.num_layers, plan.geometry.num_kv_heads)
    if isinstance(plan, FoldPlan):
        assert plan.kept is not None
        return np.minimum(plan.kept, tokens).astype(np.int64)
    lengths = np.full(shape, tokens, dtype=np.int64)
    _, windowed = windows(plan, tokens)
    if isinstance(plan, WindowPlan):
        seen = plan.window.num_sinks + plan.window.window_left + 1
        lengths[windowed] = min(tokens, seen)
    return lengths


def windows(plan: Plan, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Which streams have sinks apart from their window, and which have a window at all."""
    shape = (plan.geometry.num_layers, plan.geometry.num_kv_heads)
    none = np.zeros(shape, dtype=bool)
    if not isinstance(plan, WindowPlan):
        return none, none
    windowed = np.ones(shape, bool) if plan.windowed is None else np.asarray(plan.windowed)
    if tokens <= plan.window.num_sinks + plan.window.window_left + 1:
        return none, windowed
    return windowed & (plan.window.num_sinks > 0), windowed


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def splits_table(batch: int = 16, tokens: int = 131072) -> str:
    """The share of the limit on an H200 by the keys of a tile, as Markdown."""
    methods = [str(spec["method"]) for spec in POLICIES]
    lines = ["| keys of a tile | " + " | ".join(f"`{m}`" for m in methods) + " |"]
    lines.append("|" + " --- |" * (1 + len(methods)))
    bandwidth, sms = GPUS["H200"]
    layers = len(find_model("llama-3.1-8b").full)
    for split in (128, 256, 512, 1024, 2048):
        shares = [
            step(spec, batch, tokens, split=split).share_of_limit(sms, bandwidth, layers)
            for spec in POLICIES
        ]
        lines.append(f"| {split:,} | " + " | ".join(f"{x:.0%}" for x in shares) + " |")
    return "\n".join(lines)


def table(batch: int = 16, tokens: int = 131072) -> str:
    """Each method's decode step, as Markdown."""
    head = ["method", "K and V", "page table", "tiles' results", "launches per layer", "plans"]
    for name in GPUS:
        head += [f"{name}: at the limit", f"{name}: of it"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    layers = len(find_model("llama-3.1-8b").full)
    for spec in POLICIES:
        found = step(spec, batch, tokens)
        cells = [f"`{spec['method']}`", _gb(found.kv), _gb(found.tables), _gb(found.partial)]
        cells += [str(found.launches), f"{found.plans:.2f}"]
        for bandwidth, sms in GPUS.values():
            cells.append(f"{found.kv / (bandwidth * COPY_SHARE) * 1e3:.2f} ms")
            cells.append(f"{found.share_of_limit(sms, bandwidth, layers):.0%}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def pages_table(batch: int = 16, tokens: int = 131072) -> str:
    """What the page size costs, with every token kept and with 2,048 of them."""
    head = ["tokens per page", "K of a page", "page ids / K and V", "half a page of 2,048 tokens"]
    head += ["of 256 tokens", "a stream's table at 128K", "new page every"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    model = find_model("llama-3.1-8b")
    for size in (1, 16, 32, 64, 256):
        page = page_bytes(model.full[0], Serving(page_size=size))
        cells = [
            str(size),
            f"{page // 2 / 1024:g} KiB",
            f"{4 / page:.3%}",
            f"{size / 2 / 2048:.2%}",
            f"{size / 2 / 256:.1%}",
            f"{4 * -(-tokens // size) / 1024:g} KiB",
            f"{size} tokens",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    for part in (table(), splits_table(), pages_table()):
        print(part, end="\n\n")
