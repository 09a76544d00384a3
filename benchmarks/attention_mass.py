"""Where does a model's attention go: to its first tokens, and to how few of all?

    python -m sglang_kv.benchmarks.attention_mass --model MODEL

One forward in transformers, fp32, without a server. Means over layers, heads and queries; of each
query, over the tokens that it sees. One JSON line in results/attention_mass.jsonl:

- first_4: attention on t_0 to t_3, of queries in the second half of the text (StreamingLLM);
- top_20_of_query: what the 20 % of tokens that a query attends to most get from it;
- top_20: what the 20 % of tokens with the most accumulated attention s_j = sum over t of
  alpha_{t,j} hold of all of it, per head (H2O).
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from sglang_kv.benchmarks.common import record
from sglang_kv.benchmarks.prompts import load_text, text_name

SHARE = 0.2
FIRST = 4


def masses(weights: Tensor) -> dict[str, float]:
    """The three figures of one layer's causal attention weights ``[heads, tokens, tokens]``."""
    tokens = weights.shape[-1]
    late = weights[:, tokens // 2 :]
    seen = torch.arange(tokens // 2, tokens) + 1
    order = late.sort(-1, descending=True).values.cumsum(-1)
    at = (SHARE * seen).ceil().long() - 1
    received = weights.sum(1).sort(-1, descending=True).values
    top = received[:, : math.ceil(SHARE * tokens)].sum(-1) / received.sum(-1)
    return {
        "first_4": float(late[..., :FIRST].sum(-1).mean()),
        "top_20_of_query": float(order.gather(-1, at.expand(len(late), -1)[..., None]).mean()),
        "top_20": float(top.mean()),
    }


def measure(model_path: str, text: str, context: int) -> dict[str, Any]:
    """The figures of the text's first ``context`` tokens, and of each layer."""
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

    layers: list[dict[str, float]] = []

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        group = query.shape[1] // key.shape[1]
        k, v = (t[0].repeat_interleave(group, 0) for t in (key, value))
        logits = query[0] @ k.mT * kwargs.get("scaling", query.shape[-1] ** -0.5)
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        weights = logits.masked_fill(hidden, -math.inf).softmax(-1)
        layers.append(masses(weights))
        return (weights @ v).transpose(0, 1)[None], None

    AttentionInterface.register("masses", attend)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    ids = tokenizer(text)["input_ids"][:context]
    if len(ids) < context:
        raise ValueError(f"--context: the text has {len(ids)} tokens, {context} were asked for")
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="masses"
    )
    with torch.no_grad():
        model(torch.tensor([ids]))
    mean = {name: sum(layer[name] for layer in layers) / len(layers) for name in layers[0]}
    by_layer = {f"{name}_by_layer": [round(layer[name], 4) for layer in layers] for name in mean}
    return {name: round(value, 4) for name, value in mean.items()} | by_layer


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--text", type=Path, help="the text (default: the demo's, or a grammar's)")
    args = parser.parse_args(argv)
    try:
        found = measure(args.model, load_text(args.text), args.context)
    except ValueError as error:
        parser.error(str(error))
    about = {"arm": "full", "model": Path(args.model).name, "context": args.context}
    record("attention_mass", {**about, "text": text_name(args.text), **found})


if __name__ == "__main__":
    main()
