"""One request that never ends: how do memory, speed and perplexity hold up past the trained length?

    python benchmarks/endless_stream.py --model MODEL --text BOOK.txt --tokens 200000 --decode 20000
    python benchmarks/endless_stream.py --model MODEL --text BOOK.txt --perplexity

The first reads the text as one prompt and goes on to decode, without logprobs: head pages against
the bound computed beforehand, resident memory of the scheduler, decode speed over time. The second
asks for the logprob of every token of the prompt, for sinks and window and for a window without
sinks. The honest floor is a window that is computed anew for each token; it is asked for at places
drawn from the text, and compared with the stream's own logprobs of the same tokens.
One JSON line per arm.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import threading
import time
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks.common import record
from sglang_kv.benchmarks.methods import PAGE, geometry_of, plan_of
from sglang_kv.benchmarks.perplexity import paired
from sglang_kv.benchmarks.server import Server, generate_body, resident

BUCKET = 10_000
WARM_UP = 1500  # decoded tokens
RUN = 16  # tokens that are predicted at a place of the recomputed window


def token_ids(model: str, text: Path, count: int) -> list[int]:
    """The first tokens of a text; it begins again where it is too short."""
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(model)(text.read_text())["input_ids"]
    return (ids * (count // len(ids) + 1))[:count]


class Watch(threading.Thread):
    """Head pages that the request holds, and the scheduler's resident memory, twice a second."""

    def __init__(self, server: Server):
        super().__init__(daemon=True)
        self.server = server
        self.done = threading.Event()
        self.samples: list[tuple[float, int, int]] = []  # s, pages, bytes
        self.scheduler = server.scheduler_pid

    def run(self) -> None:
        while not self.done.wait(0.5):
            held = self.server.metric("sglang_kv:head_pages_used") - self.server.metric(
                "sglang_kv:head_pages_evictable"
            )
            self.samples.append((time.perf_counter(), int(held), resident(self.scheduler)))


def start(args: argparse.Namespace) -> Server:
    context = args.tokens + args.decode + 64
    flags = ["--context-length", str(context), "--chunked-prefill-size", str(args.chunk)]
    flags += ["--max-total-tokens", str(args.pool), "--page-size", str(PAGE), "--enable-metrics"]
    flags += ["--kv-compression", "streamingllm", "--dtype", args.dtype]
    flags += ["--decode-log-interval", "100"]
    env = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    return Server(args.model, *flags, env=env, start_timeout_s=600)


def run_stream(args: argparse.Namespace, ids: list[int]) -> dict[str, Any]:
    """One request, prompt and answer, without logprobs."""
    policy = {"method": "streamingllm", "sinks": args.sinks, "recent": args.recent}
    plan = plan_of(policy, geometry_of(args.model), len(ids))
    published = (plan.dense_prefix or 0) // PAGE
    bound = plan.peak_pages(len(ids), args.chunk, published=published)
    done: list[tuple[float, int]] = []  # when, tokens decoded: an event may bring several
    with start(args) as server:
        server.generate(ids[: 2 * args.chunk], policy, max_new_tokens=16)  # warms up
        server.flush()
        watch = Watch(server)
        begin = time.perf_counter()
        watch.start()
        body = generate_body(ids, policy, max_new_tokens=args.decode, ignore_eos=True)
        report: dict[str, Any] = {}
        for event in server.stream("/generate", body, timeout_s=6 * 3600):
            done.append((time.perf_counter(), event["meta_info"]["completion_tokens"]))
            report = event["meta_info"].get("kv_compression") or report
            if len(done) % 1000 == 1:
                print(f"{done[-1][1]:,} tokens decoded", file=sys.stderr)
        watch.done.set()
        watch.join()
    first_at, decoded = done[0][0], done[-1][1]
    in_decode = [memory for at, _, memory in watch.samples if at > first_at]
    in_prompt = [memory for at, _, memory in watch.samples if begin + 20 < at < first_at]
    count = min(BUCKET, decoded - WARM_UP)
    first, last = speed(done, WARM_UP, WARM_UP + count), speed(done, decoded - count, decoded)
    return {
        "policy": policy,
        "logical_tokens": report["logical_tokens"],
        "expected_logical_tokens": len(ids) + args.decode - 1,
        "kept_tokens": report["kept_tokens"],
        "most_head_pages": max(pages for _, pages, _ in watch.samples),
        "bound_head_pages": bound,
        "most_head_pages_in_decode": max(pages for at, pages, _ in watch.samples if at > first_at),
        "bound_head_pages_in_decode": plan.peak_pages(len(ids) + args.decode, 1),
        "prompt_tok_s": round(len(ids) / (first_at - begin), 1),
        "decode_tok_s_first": round(first, 2),
        "decode_tok_s_last": round(last, 2),
        "last_to_first": round(last / first, 4),
        "tokens_compared": count,
        "rss_in_prompt_mib": spread(in_prompt),
        "rss_in_decode_mib": spread(in_decode),
    }


def speed(done: list[tuple[float, int]], begin: int, end: int) -> float:
    """Tokens per second from the first event with `begin` tokens to the first with `end`."""
    (since, a), (until, b) = (next(d for d in done if d[1] >= count) for count in (begin, end))
    return (b - a) / (until - since)


def spread(samples: list[int]) -> dict[str, float] | None:
    """Resident memory over time: of the first and last tenth, and the extremes; None: too short."""
    if not samples:
        return None
    tenth = max(1, len(samples) // 10)
    parts: dict[str, float] = {
        "first": fmean(samples[:tenth]),
        "last": fmean(samples[-tenth:]),
        "least": min(samples),
        "most": max(samples),
    }
    return {name: round(value / 2**20, 1) for name, value in parts.items()}


def losses_of(server: Server, ids: list[int], policy: dict[str, Any]) -> list[float]:
    """Negative logprob of each token but the first."""
    answer = server.post(
        "/generate",
        generate_body(ids, policy, max_new_tokens=1, return_logprob=True, logprob_start_len=0),
        timeout_s=6 * 3600,
    )
    return [-entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


def per_bucket(losses: list[float]) -> list[float]:
    parts = (losses[i : i + BUCKET] for i in range(0, len(losses), BUCKET))
    return [round(math.exp(fmean(part)), 3) for part in parts]


def places(count: int, samples: int) -> list[int]:
    """Where the window is recomputed: as many starts in each bucket but the first."""
    found: list[int] = []
    for bucket in range(BUCKET, count - RUN, BUCKET):
        here = range(bucket, min(bucket + BUCKET, count - RUN))
        found += sorted(random.Random(bucket).sample(here, min(samples, len(here))))
    return found


def recomputed(
    server: Server, ids: list[int], stream: list[float], window: int, samples: int
) -> dict[str, Any]:
    """What a window computed anew says of some tokens, beside ``stream``, the stream's losses.

    Each place costs a prefill of the window, so RUN tokens are scored there: the first is
    predicted from ``window`` tokens and nothing else, the last from ``window + RUN - 1``.
    A place stands for itself in the intervals; its tokens are not independent.
    """
    pairs: dict[int, tuple[float, float]] = {}
    for at in places(len(ids), samples):
        answer = server.generate(
            ids[at - window : at + RUN],
            {"method": "none"},
            max_new_tokens=1,
            return_logprob=True,
            logprob_start_len=window - 1,
        )
        anew = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][-RUN:]]
        pairs[at] = (-fmean(stream[at - 1 : at - 1 + RUN]), fmean(anew))
    half = BUCKET + (len(ids) - BUCKET) // 2
    return {
        "window": window,
        "samples": samples,
        "tokens_per_place": RUN,
        "beside_stream": paired(list(pairs.values())),
        "beside_stream_first_half": paired([pair for at, pair in pairs.items() if at < half]),
        "beside_stream_second_half": paired([pair for at, pair in pairs.items() if at >= half]),
    }


def about(args: argparse.Namespace, ids: list[int]) -> dict[str, Any]:
    """What all arms' lines have."""
    return {
        "model": Path(args.model).name,
        "text": args.text.name,
        "dtype": args.dtype,
        "tokens": len(ids),
        "bucket": BUCKET,
    }


def perplexities(args: argparse.Namespace, ids: list[int]) -> None:
    window = args.sinks + args.recent
    arms = {
        f"{args.sinks} sinks": ({"sinks": args.sinks, "recent": args.recent}, len(ids)),
        "no sinks": ({"sinks": 0, "recent": window}, args.without_sinks or len(ids)),
    }
    losses: dict[str, list[float]] = {}
    with start(args) as server:
        for arm, (sizes, count) in arms.items():
            policy = {"method": "streamingllm", **sizes}
            losses[arm] = losses_of(server, ids[:count], policy)
            row: dict[str, Any] = {"policy": policy, "perplexity": per_bucket(losses[arm])}
            record("endless_stream", {"arm": arm, **about(args, ids[:count]), **row})
        row = recomputed(server, ids, losses[f"{args.sinks} sinks"], window, args.samples)
        record("endless_stream", {"arm": "recomputed window", **about(args, ids), **row})


def wrong(args: argparse.Namespace) -> str | None:
    """What would end a run of hours with no line, if anything."""
    if not args.text.exists():
        return f"--text: {args.text}: no such file"
    if args.perplexity:
        if args.sinks + args.recent >= BUCKET:
            return f"--sinks, --recent: must be less than {BUCKET:,} together"
        if args.tokens < 3 * BUCKET:  # a place in each half of what follows the first bucket
            least = f"{3 * BUCKET:,} with --perplexity"
            return f"--tokens: must be at least {least}, got {args.tokens:,}"
        if args.samples < 1:
            return f"--samples: must be at least 1, got {args.samples}"
    elif args.decode < 2 * WARM_UP:
        return f"--decode: must be at least {2 * WARM_UP:,}, got {args.decode:,}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--decode", type=int, default=20_000)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--recent", type=int, default=1020)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--pool", type=int, default=8192, help="memory, in tokens of full KV")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--perplexity", action="store_true")
    parser.add_argument("--without-sinks", type=int, help="tokens of the arm without sinks")
    parser.add_argument("--samples", type=int, default=4, help="recomputed windows per bucket")
    args = parser.parse_args()
    if fault := wrong(args):
        parser.error(fault)
    ids = token_ids(args.model, args.text, args.tokens)
    if args.perplexity:
        perplexities(args, ids)
        return
    row = run_stream(args, ids)
    record("endless_stream", {"arm": "memory and speed", **about(args, ids), **row})


if __name__ == "__main__":
    main()
