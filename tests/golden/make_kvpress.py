"""Write kvpress.json: what kvpress 0.5.5 keeps of seeded random queries and keys.

kvpress pins other releases than this project, so it needs an environment of its own, outside
the checkout; the tests read only the file. To regenerate it, from the root of the checkout:

    python3.11 -m venv ../kvpress-env
    ../kvpress-env/bin/pip install kvpress==0.5.5 torch==2.14.1
    PYTHONPATH=tests/support ../kvpress-env/bin/python tests/golden/make_kvpress.py

Selection is kvpress's own, through `compress()` and `get_layer_budget()`. It takes its queries
from hidden states, a projection and RoPE; with the identity for a projection, cos = 1 and
sin = 0 they are the given queries, bit for bit. The values it compresses are the positions.

Where kvpress departs from the papers and their code (q_len tokens, window w, r the
compression ratio, x = q_len * (1 - r)):

SnapKV
- The budget is a ratio: n_kept = max(1, int(x)), window included. The float of 1 - r may fall
  short: r = 0.9 keeps 99 of 1000. r = 0 skips the selection.
- Scores are the mean over queries where SnapKV sums (the same order), pooled per query head
  and then averaged over the group: SnapKV keeps a set per query head. Average pooling only.
- The window survives by a score of max + 1. If n_kept < w, all it keeps are n_kept window
  tokens, any of them, since they tie. There are no kept sets of that here.
- q_len <= w is an assertion error, and an even kernel_size fails in a reshape.

PyramidKV
- The line runs through x, and n_kept includes the window. The original's runs through C - w,
  and w is added on top.
- min = x / beta, max = 2x - min; if max >= q_len - w: max = q_len - w, min = 2x - max.
  n_kept = round(max - layer * (max - min) / (layers - 1)), to even at a half. Nothing
  rebalances, so the sum is off by up to layers / 2.
- Unless q_len >= max >= min >= w, every layer keeps max(1, round(x)). Without the clamp that
  is whenever x < beta * w: at the defaults (w = 64, beta = 20) a pyramid needs 1280 kept
  tokens. With the clamp it is whenever r > 0.5 or x > q_len - w; at r = 0.5 the last layer
  keeps its window and nothing else. That round() is not SnapKV's int(): 100 and 99 of 1000.
- One layer keeps round(max), almost 2x, where the paper's budget is x.
- The original compresses nothing if q_len < C and is uniform if q_len < 2(C - w); kvpress
  always applies the ratio.
"""

from __future__ import annotations

import itertools
import json
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import golden
import torch
from kvpress import PyramidKVPress, SnapKVPress
from torch import Tensor, nn

HEAD_DIM = 64
HEADS = {1: (2, 2), 3: (9, 3), 4: (8, 2), 8: (16, 2)}  # by group size: query heads, KV heads
TOKENS = (65, 200, 513, 1000)
WINDOWS = (8, 16, 64)
KERNELS = (1, 5, 7, 31)
DROPPED = (0.5, 0.75, 0.9)
LAYERS = (1, 4, 30)
BETAS = (20, 5, 1)

# A relative gap between two scores that no order of fp32 additions closes.
MARGIN = 5e-6


def attention(q_heads: int, kv_heads: int, layers: int, layer: int) -> Any:
    """As much of an attention module as kvpress looks at."""
    config = SimpleNamespace(
        num_attention_heads=q_heads, num_key_value_heads=kv_heads, num_hidden_layers=layers
    )
    return SimpleNamespace(config=config, head_dim=HEAD_DIM, layer_idx=layer, q_proj=nn.Identity())


def compress(
    press: SnapKVPress, module: Any, q: Tensor, k: Tensor
) -> tuple[list[list[int]], float]:
    """Kept positions per KV head, and the margin of the closest decision."""
    tokens, window = k.shape[1], q.shape[1]
    hidden = torch.zeros(1, tokens, q.shape[0] * HEAD_DIM)
    hidden[0, -window:] = q.transpose(0, 1).flatten(1)
    rotary = torch.ones(1, tokens, HEAD_DIM), torch.zeros(1, tokens, HEAD_DIM)
    values = torch.arange(tokens).float()[None, None, :, None].expand_as(k[None])
    inputs = (module, hidden, k[None], values, None, {"position_embeddings": rotary})

    _, kept = press.compress(*inputs)
    positions = [sorted(int(p) for p in head) for head in kept[0, :, :, 0]]

    ranked = press.score(*inputs)[0, :, : tokens - window].sort(descending=True).values
    chosen = kept.shape[2] - window
    margin = 1.0
    if 0 < chosen < tokens - window:
        gap = (ranked[:, chosen - 1] - ranked[:, chosen]) / ranked[:, chosen - 1]
        margin = float(gap.min())
    return positions, margin


def snapkv_rows() -> list[dict[str, Any]]:
    product = list(itertools.product(HEADS, TOKENS, WINDOWS, KERNELS, DROPPED))
    # Nothing dropped, and nothing kept but the window.
    product += [(group, 200, 16, 5, 0.0) for group in HEADS]
    product += [(group, 65, 64, kernel_size, 0.01) for group in HEADS for kernel_size in (1, 31)]
    rows = []
    for number, (group, tokens, window, kernel_size, dropped) in enumerate(product):
        q_heads, kv_heads = HEADS[group]
        press = SnapKVPress(dropped, window, kernel_size)
        shape = shape_of(group, tokens, window)
        for seed in itertools.count(number, 10_000):
            module = attention(q_heads, kv_heads, 1, 0)
            kept, margin = compress(press, module, *golden.tensors(seed, **shape))
            if margin >= MARGIN:
                break
        if len(kept[0]) >= window:
            rows.append(
                {
                    "seed": seed,
                    **shape,
                    "kernel_size": kernel_size,
                    "compression_ratio": dropped,
                    "budget": len(kept[0]),
                    "margin": float(f"{margin:.2g}"),
                    "kept": [golden.pack(head) for head in kept],
                }
            )
    return rows


def pyramidkv_rows() -> list[dict[str, Any]]:
    product = itertools.product(LAYERS, BETAS, ((200, 8, 0.5), (200, 16, 0.75), (513, 8, 0.75)))
    rows = []
    for number, (layers, beta, (tokens, window, dropped)) in enumerate(product):
        group, kernel_size = list(HEADS)[number % 4], KERNELS[number // 3 % 4]
        q_heads, kv_heads = HEADS[group]
        press = PyramidKVPress(dropped, window, kernel_size, beta)
        shape = shape_of(group, tokens, window)
        for seed in itertools.count(1_000_000 + 100 * number, 10_000):
            results = [
                compress(
                    press,
                    attention(q_heads, kv_heads, layers, layer),
                    *golden.tensors(seed + layer, **shape),
                )
                for layer in range(layers)
            ]
            margins = [margin for _, margin in results]
            if min(margins) >= MARGIN:
                break
        budgets = [len(kept[0]) for kept, _ in results]
        assert min(budgets) >= window
        rows.append(
            {
                "seed": seed,
                **shape,
                "kernel_size": kernel_size,
                "compression_ratio": dropped,
                "beta": beta,
                "budgets": budgets,
                "margins": [float(f"{margin:.2g}") for margin in margins],
                "kept": [[golden.pack(head) for head in kept] for kept, _ in results],
            }
        )
    return rows


def pyramidkv_budget_rows() -> list[dict[str, Any]]:
    product = itertools.product(LAYERS, BETAS, (*TOKENS, 4096), WINDOWS, DROPPED)
    rows = []
    for layers, beta, tokens, window, dropped in product:
        press = PyramidKVPress(dropped, window, 5, beta)
        modules = [attention(1, 1, layers, layer) for layer in range(layers)]
        rows.append(
            {
                "tokens": tokens,
                "window": window,
                "compression_ratio": dropped,
                "beta": beta,
                "budgets": [press.get_layer_budget(module, tokens) for module in modules],
            }
        )
    return rows


def shape_of(group: int, tokens: int, window: int) -> dict[str, int]:
    q_heads, kv_heads = HEADS[group]
    return {
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "tokens": tokens,
        "window": window,
    }


def main() -> None:
    parts = {
        "snapkv": snapkv_rows(),
        "pyramidkv": pyramidkv_rows(),
        "pyramidkv_budgets": pyramidkv_budget_rows(),
    }
    made_by = {name: version(name) for name in ("kvpress", "torch")}
    lines = [f'"made_by": {json.dumps(made_by)}']
    for name, rows in parts.items():
        # A case a line, so that a diff shows which cases changed.
        cases = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        lines.append(f'"{name}": [\n{cases}\n]')
        print(f"{name}: {len(rows)} cases")
    golden.KVPRESS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
