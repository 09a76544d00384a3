"""Does weighting by retrieval heads matter for what the prefix tree keeps?

    python benchmarks/prefix_gates.py --model MODEL [--gates FILE] [--traffic tenants agents rag]

A model reads every prompt of three workloads (`prefix_text`), and the attention of its last queries
is kept head by head. The tree is then replayed with the same attention under other weights, at
equal memory: calibrated gates, all-one gates, the same gates dealt out to other heads, no attention
at all (who reads, when and how often), and without importance: cost to recompute alone, lru, lfu,
slru; with what nobody can exceed. The first four also with a half-life so long that attention
outweighs recency, so that the weights can make a difference if they are worth anything. One JSON
line per workload and size of memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks.common import record
from sglang_kv.benchmarks.prefix_text import TEXTS, Traffic
from sglang_kv.compression.gates import HeadGates, find_gates, load_gates, require_match
from sglang_kv.radix.importance import HALF_LIFE, page_density
from sglang_kv.radix.optimum import optimum
from sglang_kv.radix.replay import replay, with_signal
from sglang_kv.radix.trace import Request
from sglang_kv.worth import QUERIES, SINKS

PAGE = 16
SHUFFLES = 5
#: A half-life, in fillings of the memory, at which what drew attention outlives what came lately.
LONG = 4.0
OTHERS = {"recompute cost": "cost", "lru": "lru", "lfu": "lfu", "slru": "slru"}
Mass = NDArray[np.float32]  # [layers, kv_heads, tokens]


class Reader:
    """A transformers model that says what the last queries of a prompt attended to.

    What two prompts in a row begin with alike is computed once.

    Args:
        path: the model's folder.
    """

    def __init__(self, path: str) -> None:
        import torch
        from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

        self.torch, self.fresh = torch, DynamicCache
        AttentionInterface.register("sglang_kv_window", self._attend)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sglang_kv_window"
        )
        self.model = model.model.eval()  # no logits are wanted
        config = model.config
        self.shape = (config.num_hidden_layers, config.num_key_value_heads)
        self.cache, self.known = DynamicCache(), list[int]()
        self.mass: Any = None

    def _attend(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
    ) -> tuple[Any, None]:
        torch = self.torch
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        group, new, seen = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
        rows = torch.arange(seen - new, seen)[:, None]
        allowed = torch.arange(seen)[None, :] <= rows
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, scale=scale, enable_gqa=True
        )
        last = query[0, :, -QUERIES:] * scale
        logits = torch.einsum("hqd,hkd->hqk", last, key[0].repeat_interleave(group, 0))
        logits.masked_fill_(~allowed[-QUERIES:], -torch.inf)
        sums = logits.softmax(-1).sum(1)  # [query heads, tokens]
        self.mass[module.layer_idx] = sums.view(key.shape[1], group, seen).sum(1)
        return out.transpose(1, 2).contiguous(), None

    def read(self, prompt: list[int]) -> Mass:
        """Attention of the last `QUERIES` tokens, summed over queries and each KV head's group."""
        same = 0
        limit = min(len(self.known), len(prompt) - QUERIES)
        while same < limit and self.known[same] == prompt[same]:
            same += 1
        if same == 0:
            self.cache = self.fresh()
        else:
            self.cache.crop(same - len(self.known))
        torch = self.torch
        self.mass = torch.zeros(*self.shape, len(prompt))
        with torch.inference_mode():
            ids = torch.tensor([prompt[same:]])
            self.model(input_ids=ids, past_key_values=self.cache, use_cache=True)
        self.known = list(prompt)
        found: Mass = self.mass.numpy()
        return found


def masses(traffic: Traffic, reader: Reader) -> list[Mass]:
    """What each prompt's last queries saw, in the order of the traffic."""
    order = sorted(range(len(traffic.turns)), key=lambda i: traffic.prompt(traffic.turns[i]))
    found = {index: reader.read(traffic.prompt(traffic.turns[index])) for index in order}
    return [found[index] for index in range(len(traffic.turns))]


def weighted(traffic: Traffic, seen: list[Mass], weights: NDArray[Any]) -> list[Request]:
    """The traffic as a trace, with importance as a server would measure it."""
    trace = []
    for turn, mass in zip(traffic.turns, seen, strict=True):
        per_token = np.einsum("lh,lht->t", weights, mass)
        density = page_density(per_token, PAGE, sinks=SINKS, window=QUERIES)
        trace.append(Request(*traffic.request(turn), turn.namespace, density))
    return trace


class Arms:
    """The same traffic and attention under each arm's weights."""

    def __init__(self, traffic: Traffic, seen: list[Mass], gates: HeadGates):
        values = gates.values
        rng = np.random.default_rng(0)
        self.gated = weighted(traffic, seen, values)
        self.plain = weighted(traffic, seen, np.ones_like(values))
        self.shuffled = [
            weighted(traffic, seen, rng.permutation(values.ravel()).reshape(values.shape))
            for _ in range(SHUFFLES)
        ]

    def by_weights(self, memory: int, half_life: float) -> dict[str, int]:
        """Hit tokens of `importance` by whose attention counts; shuffled: the mean of some."""

        def hits(trace: list[Request]) -> int:
            done = replay(trace, memory, "importance", page_size=PAGE, half_life=half_life)
            return done.hit_tokens

        return {
            "calibrated gates": hits(self.gated),
            "all-one gates": hits(self.plain),
            "shuffled gates": round(sum(map(hits, self.shuffled)) / SHUFFLES),
            "no attention": hits(with_signal(self.plain, "uniform")),
        }

    def without_importance(self, memory: int) -> dict[str, int]:
        """Hit tokens of the other orders, and their bound."""
        found = {
            name: replay(self.plain, memory, order, page_size=PAGE).hit_tokens
            for name, order in OTHERS.items()
        }
        return {**found, "optimum": optimum(self.plain, memory, page_size=PAGE)}


def agreement(traffic: Traffic, seen: list[Mass], gates: HeadGates) -> float:
    """How alike gated and plain page densities are: the mean correlation of a prompt's pages."""
    pairs = zip(
        weighted(traffic, seen, gates.values),
        weighted(traffic, seen, np.ones_like(gates.values)),
        strict=True,
    )
    found = [float(np.corrcoef(a.importance, b.importance)[0, 1]) for a, b in pairs]  # type: ignore[arg-type]
    return round(float(np.mean(found)), 4)


def run(
    name: str,
    encode: Callable[[str], list[int]],
    reader: Reader,
    gates: HeadGates,
    requests: int,
    seed: int,
    about: dict[str, Any],
    out: Path | None,
) -> None:
    make, sizes = TEXTS[name]
    traffic = make(encode, seed, requests=requests)
    begin = time.perf_counter()
    seen = masses(traffic, reader)
    took = time.perf_counter() - begin
    alike, arms = agreement(traffic, seen, gates), Arms(traffic, seen, gates)
    for memory in sizes:
        row = {
            "arm": f"{name} {memory}",
            "traffic": name,
            "memory_tokens": memory,
            "requests": len(traffic.turns),
            "prompt_tokens": sum(len(traffic.prompt(turn)) for turn in traffic.turns),
            "seed": seed,
            "hit_tokens": {
                **arms.by_weights(memory, HALF_LIFE),
                **arms.without_importance(memory),
            },
            "long_half_life": LONG,
            "hit_tokens_at_long": arms.by_weights(memory, LONG),
            "gated_and_plain_correlate": alike,
            "reading_s": round(took, 1),
            **about,
        }
        record("prefix_gates", row, path=out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a Llama-like model")
    parser.add_argument("--gates", type=Path, help="default: the model's own")
    parser.add_argument("--traffic", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="instead of benchmarks/results/prefix_gates.jsonl")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    reader = Reader(args.model)
    gates = load_gates(args.gates) if args.gates else find_gates(args.model, *reader.shape)
    if gates is None:
        parser.error(f"--gates: give a file, {args.model} has no gates of its own")
    require_match(gates, *reader.shape)
    about = {"model": Path(args.model).name, "gates": gates.method}
    for name in args.traffic:
        encode: Callable[[str], list[int]] = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
        run(name, encode, reader, gates, args.requests, args.seed, about, args.out)


if __name__ == "__main__":
    main()
