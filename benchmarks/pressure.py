"""When memory runs out: evict the least important pages, or retract whole requests?

    python benchmarks/pressure.py --model MODEL

A pool of a third of what the traffic wants at once: many requests, each with a prompt and a long
answer. One server per arm, the same requests in the same order, the same pool; the time until the
last answer, and what it cost in quality: how many of the answers' tokens are those of a server with
room for everything. SGLang by itself lets in what it expects to fit, so that the others wait and
few are retracted; a second arm lets in more and retracts (`--schedule-conservativeness`). The
server with room for everything always runs: the others' answers are compared with its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks.common import record
from sglang_kv.benchmarks.prompts import load_text
from sglang_kv.benchmarks.server import Server

Answers = list[dict[str, Any]]
#: Its answers are those that the others' are compared with.
REFERENCE = "room for all"
#: Further flags of each arm.
ARMS: dict[str, list[str]] = {
    REFERENCE: [],
    "retract": [],
    "retract, letting in more": ["--schedule-conservativeness", "0.1"],
    "evict": ["--kv-pressure", "evict"],
}


def prompts(model: str, count: int, length: int) -> list[list[int]]:
    """Different passages of the demo's story, so that no prefix is shared.

    Raises:
        ValueError: the story has not so many.
    """
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(model)(load_text())["input_ids"]
    step = (len(ids) - length) // max(1, count - 1)
    if step < 1:
        raise ValueError(
            f"--requests, --prompt: {count} passages of {length} tokens that begin differently are "
            f"not in a text of {len(ids)}"
        )
    return [ids[i * step : i * step + length] for i in range(count)]


def serve(server: Server, work: list[list[int]], new_tokens: int) -> tuple[Answers, float]:
    start = time.perf_counter()
    with ThreadPoolExecutor(len(work)) as clients:
        answers = list(
            clients.map(
                lambda ids: server.generate(ids, max_new_tokens=new_tokens, ignore_eos=True), work
            )
        )
    return answers, time.perf_counter() - start


def agreement(answers: Answers, reference: Answers) -> float:
    """Mean share of an answer before its first token that differs."""
    shares = []
    for got, want in zip(answers, reference, strict=True):
        pairs = zip(got["output_ids"], want["output_ids"], strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(want["output_ids"]))
        shares.append(same / len(want["output_ids"]))
    return sum(shares) / len(shares)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=500)
    parser.add_argument("--new-tokens", type=int, default=500)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--floor", type=float, default=0.25)
    args = parser.parse_args()
    for name in ("requests", "prompt", "new_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be at least 1")
    wanted = args.requests * (args.prompt + args.new_tokens)
    try:
        work = prompts(args.model, args.requests, args.prompt)
    except ValueError as error:
        parser.error(str(error))
    flags = ["--max-running-requests", str(args.requests), "--enable-metrics"]
    flags += ["--kv-compression", "none", "--disable-radix-cache"]
    reference: Answers | None = None
    seconds: dict[str, float] = {}
    for arm in (arm for arm in ARMS if arm == REFERENCE or arm in args.arms):
        pool = wanted + 2048 if arm == REFERENCE else wanted // 3
        extra = ["--max-total-tokens", str(pool), *ARMS[arm]]
        if arm == "evict":
            extra += ["--kv-pressure-floor", str(args.floor)]
        with Server(args.model, *flags, *extra) as server:
            serve(server, [[5] * 64] * 2, 8)
            answers, seconds[arm] = serve(server, work, args.new_tokens)
            retracted = server.log.count("KV cache pool is full. Retract requests.")
        reference = reference or answers
        reports = [answer["meta_info"]["kv_compression"] for answer in answers]
        record(
            "pressure",
            {
                "arm": arm,
                "requests": args.requests,
                "prompt": args.prompt,
                "new_tokens": args.new_tokens,
                "pool_tokens": pool,
                "wanted_tokens": wanted,
                "seconds": round(seconds[arm], 1),
                "output_tok_s": round(args.requests * args.new_tokens / seconds[arm], 1),
                "ratio_to_retract": round(seconds.get("retract", 0) / seconds[arm], 2),
                "retractions_logged": retracted,
                "tokens_evicted": sum(r.get("evicted_tokens", 0) for r in reports),
                "same_answer_until": round(agreement(answers, reference), 3),
            },
        )


if __name__ == "__main__":
    main()
