"""Where does the time of a decode step go, in stock SGLang and here?

    pip install 'sglang-kv[bench]'
    python benchmarks/step_time.py --model MODEL --arms stock,none,snapkv\\ 1/4

The scheduler process is sampled with py-spy while a batch decodes, in each arm with the same
flags and prompts. A sample belongs to the first part of `PARTS` that one of its frames, innermost
first, stands for; the share of samples times the step's length is the part's time. Sampling
stops the process for a moment each time, so the step is timed without it, right before. One JSON
line per arm.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks.common import read_bandwidth_gb_s, record
from sglang_kv.benchmarks.methods import NONE, PAGE, arms
from sglang_kv.benchmarks.server import Server, generate_body

# What a frame, "function file", stands for. The innermost frame that any of these knows decides.
PARTS = {
    "KV append": r"^append transfer\.py|\.set_kv_buffer ",
    "scores": r"^column_sums ",
    "attention": r"(\._attend|\.forward_decode|\.forward_extend) |^(decode|extend) attention\.py"
    r"|_run_sdpa_forward|^unified_attention",
    "norm, rotary, activation": r" (layernorm|activation|elementwise)\.py|rotary_embedding"
    r"|^(rms_norm|rotary|silu_and_mul) fused\.py",
    "lm head": r" logits_processor\.py|^lm_head fused\.py",
    # Not the function `linear`, which is called for the lm head as well.
    "linear layers": r"\.\w+ linear\.py| (unquant|amx_utils)\.py|^unquantized fused\.py",
    "sampling": r" (sampler|sampling_batch_info)\.py",
    "page ledgers": r" (state|drop|fold|admission|streams|request|pressure|ledger|pool)\.py"
    r"|HeadPageAttnBackend\.(init_forward_metadata|_place|_score_pass) ",
    "rest of the model": r" (llama|vocab_parallel_embedding|stage|construction|causal_lm)\.py",
    "scheduler": r" (scheduler\w*|schedule_\w+|overlap_utils|tp_worker|model_runner|metrics"
    r"|forward_batch_info|batch_result_processor|output_streamer|event_loop\w*)\.py",
}
# The scheduler's own thread; others of its process only wait.
LOOP = "event_loop"

PY_SPY = Path(sys.executable).with_name("py-spy")


def part_of(stack: str) -> str:
    """The part that a collapsed stack, outermost frame first, was sampled in."""
    for frame in reversed(stack.split(";")):
        # "Class.function (folder/file.py:12)"
        name = re.sub(r" \((?:.*/)?([^/:]+).*\)$", r" \1", frame)
        for part, pattern in PARTS.items():
            if re.search(pattern, name):
                return part
    return "other"


def shares(lines: Iterable[str]) -> tuple[dict[str, float], int]:
    """Each part's share of the samples, and their number; collapsed stacks, `frame;frame COUNT`.

    Stacks of threads other than the scheduler's are left out.
    """
    counts: collections.Counter[str] = collections.Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        if LOOP in stack:
            counts[part_of(stack)] += int(count)
    total = counts.total()
    if total == 0:
        raise SystemExit("py-spy took no samples of the scheduler: may it use ptrace here?")
    return {part: count / total for part, count in counts.most_common()}, total


class Decoding:
    """A batch of requests that decodes in the background, until it is left."""

    def __init__(self, server: Server, prompts: list[list[int]], policy: Any, tokens: int):
        self.times: list[list[float]] = [[] for _ in prompts]
        self._left = threading.Event()

        def one(index: int) -> None:
            body = generate_body(prompts[index], policy, max_new_tokens=tokens, ignore_eos=True)
            for _ in server.stream("/generate", body, timeout_s=1800):
                self.times[index].append(time.perf_counter())
                if self._left.is_set():
                    return

        self._threads = [threading.Thread(target=one, args=(i,)) for i in range(len(prompts))]
        for thread in self._threads:
            thread.start()
        while not all(self.times):
            if not self.all_decode():
                raise SystemExit("a request ended before all of them decoded")
            time.sleep(0.1)

    def all_decode(self) -> bool:
        """Whether no request has ended."""
        return all(thread.is_alive() for thread in self._threads)

    def step_s(self, begin: float, end: float) -> float:
        inside = [[x for x in times if begin <= x <= end] for times in self.times]
        return statistics.median(b - a for times in inside for a, b in itertools.pairwise(times))

    def leave(self) -> None:
        self._left.set()
        for thread in self._threads:
            thread.join()


def sample(pid: int, seconds: int, rate: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "stacks.txt"
        command = [str(PY_SPY), "record", "--pid", str(pid)]
        command += ["--duration", str(seconds), "--rate", str(rate), "--function"]
        # Stopping the process for each sample would make threads wait for each other, and that
        # wait would be counted where they meet: in the products.
        command += ["--nonblocking", "--format", "raw", "--output", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not out.exists():
            raise SystemExit(f"py-spy: {done.stderr.strip()[-500:]}")
        return out.read_text().splitlines()


def measure(server: Server, args: argparse.Namespace, policy: Any) -> dict[str, Any]:
    rng = random.Random(args.seed)
    prompts = [[rng.randrange(100, 40000) for _ in range(args.context)] for _ in range(args.batch)]
    decoding = Decoding(server, prompts, policy, args.tokens)
    try:
        begin = time.perf_counter()
        time.sleep(args.seconds)
        step_ms = decoding.step_s(begin, time.perf_counter()) * 1e3
        begin = time.perf_counter()
        stacks = sample(server.scheduler_pid, args.sampled_seconds, args.rate)
        end = time.perf_counter()
        # By the threads: an event may have several tokens.
        if not decoding.all_decode():
            raise SystemExit("the answers ended while they were sampled: raise --tokens")
        sampled_ms = decoding.step_s(begin, end) * 1e3
    finally:
        decoding.leave()
    found, samples = shares(stacks)
    return {
        "step_ms": round(step_ms, 1),
        "sampled_step_ms": round(sampled_ms, 1),
        "samples": samples,
        "parts_ms": {part: round(share * step_ms, 2) for part, share in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=1000, help="at most, per answer")
    parser.add_argument("--seconds", type=int, default=15, help="timed without sampling")
    parser.add_argument("--sampled-seconds", type=int, default=60, help="sampled after that")
    parser.add_argument("--rate", type=int, default=20, help="samples per second")
    parser.add_argument("--arms", default="stock,none,snapkv 1/4")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not PY_SPY.exists():
        parser.error("needs py-spy: pip install 'sglang-kv[bench]'")
    policies = {"none": NONE, **arms(args.context)}
    chosen = args.arms.split(",")
    if unknown := set(chosen) - {"stock", *policies}:
        parser.error(f"--arms: {', '.join(unknown)}: expected some of stock, {', '.join(policies)}")
    pool = args.batch * (args.context + args.tokens + 64) + 4096
    flags = ["--max-total-tokens", str(pool), "--max-running-requests", str(max(8, args.batch))]
    flags += ["--chunked-prefill-size", "4096", "--page-size", str(PAGE), "--disable-radix-cache"]
    bandwidth = read_bandwidth_gb_s()
    for arm in chosen:
        policy = policies.get(arm)
        extra = ["--kv-compression", "none"] if policy else ["--attention-backend", "torch_native"]
        with Server(args.model, *flags, *extra) as server:
            row = measure(server, args, policy)
        shape = {"model": Path(args.model).name, "batch": args.batch, "context": args.context}
        shape["policy"] = policy
        record("step_time", {"arm": arm, **shape, **row, "read_gb_s": round(bandwidth, 1)})


if __name__ == "__main__":
    main()
