"""Beside others, with the same model and prompts: kvpress, stock SGLang, llama.cpp.

    python benchmarks/peers.py --model MODEL --kvpress ../kvpress-env --llama-cpp ../llama-env

`speed`: a batch decodes together, as in decode_speed.py; step, prefill, bytes of KV in decode,
peak resident memory of the process that holds the model. `quality`: needles and kept tokens beside
kvpress (peers_quality.py). kvpress and llama.cpp have environments of their own, in folders outside
the checkout (`--install` makes them). llama.cpp gets the same weights, converted by gguf_model.py.
One JSON line per engine and arm; rows that lose stay. Run it on a quiet machine.

Where definitions differ: kvpress drops once, after the prompt, while `h2o` here goes on in decode;
it averages a token's attention over the queries that see it, where H2O sums. Its PyramidKV counts
the window in the budget, and falls back to equal layers where the last would get less than that.
Its StreamingLLM and DuoAttention act once, after a dense prefill; ours do so too here (`fold_at`),
and their windows then move on in decode. Its DuoAttention masks keys, keeps their memory, and gets
our streaming heads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks import peers_quality
from sglang_kv.benchmarks.arms import work_folder
from sglang_kv.benchmarks.common import environment, record, results_file
from sglang_kv.benchmarks.decode_speed import measure, random_prompts, run_batch
from sglang_kv.benchmarks.gguf_model import convert
from sglang_kv.benchmarks.methods import PAGE, Policy
from sglang_kv.benchmarks.peers_outside import RUNNERS, install, outside, python_of
from sglang_kv.benchmarks.peers_quality import EAGER, arms, kvpress_job, press_for
from sglang_kv.benchmarks.server import Server
from sglang_kv.benchmarks.watch import Watch, peak_rss_bytes, prove_engine

PARTS = ("speed", "quality")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="the folder of a Llama model")
    parser.add_argument("--kvpress", type=Path, help="environment with kvpress; left out: none")
    parser.add_argument("--llama-cpp", type=Path, help="environment with llama-cpp-python")
    parser.add_argument("--install", action="store_true", help="make the environments")
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--engines", default="stock,sglang-kv,kvpress,llama.cpp")
    parser.add_argument("--arms", help="comma-separated (default: all)")
    parser.add_argument("--keep-ratio", type=float, default=0.25)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    speed = parser.add_argument_group("speed")
    speed.add_argument("--batch", type=int, default=8)
    speed.add_argument("--context", type=int, default=4000)
    speed.add_argument("--steps", type=int, default=48, help="decoded tokens per request")
    speed.add_argument("--gguf-dtype", default="bf16", help="%(default)s or f16")
    quality = parser.add_argument_group("quality")
    quality.add_argument("--lengths", default="1024,2048", help="prompt tokens")
    quality.add_argument("--depths", default="0.1,0.3,0.5,0.7,0.9")
    quality.add_argument("--samples", default="5", help="numbers per depth; or of each length")
    quality.add_argument("--words", default="0", help="words per depth; or of each length")
    quality.add_argument("--limit", type=int, help="most prompts")
    quality.add_argument("--text", type=Path, help="the text (default: the demo's story)")
    parser.add_argument("--work", type=Path, default=work_folder().with_name("peers"))
    parser.add_argument("--results", type=Path, default=results_file("peers"))
    parser.add_argument("--again", action="store_true", help="also what --results has already")
    args = parser.parse_args(argv)
    try:
        check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def check(args: argparse.Namespace) -> None:
    """Lists out of text, and what they need.

    Raises:
        ValueError: naming the flag that is wrong.
    """
    args.part = some_of("--part", args.part, PARTS)
    args.engines = some_of("--engines", args.engines, ("stock", "sglang-kv", *RUNNERS))
    if not 0 < args.keep_ratio < 1:
        raise ValueError(f"--keep-ratio must be between 0 and 1, got {args.keep_ratio}")
    args.pairs = arms(args.keep_ratio)
    args.arms = some_of("--arms", args.arms or ",".join(args.pairs), args.pairs)
    for name in ("threads", "chunk", "batch", "context"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.steps < 3:
        raise ValueError(f"--steps must be at least 3, got {args.steps}")
    args.lengths = [int(n) for n in args.lengths.split(",")]
    for name in ("samples", "words"):
        setattr(args, name, counts("--" + name, getattr(args, name), len(args.lengths)))
    args.depths = [float(n) for n in args.depths.split(",")]
    if not (args.model / "config.json").exists():
        raise ValueError(f"--model: {args.model} has no config.json")
    folders = {"kvpress": args.kvpress, "llama.cpp": args.llama_cpp}
    args.engines = [name for name in args.engines if folders.get(name, args.model)]
    for name in set(folders) & set(args.engines):
        flag = "--" + name.replace(".", "-")
        if not args.install and not python_of(folders[name]).exists():
            raise ValueError(f"{flag}: {folders[name]} is no environment; --install makes it")
    args.folders = folders


def counts(flag: str, text: str, lengths: int) -> list[int]:
    """One count for each length; a single one stands for all."""
    found = [int(part) for part in text.split(",") if part.isdigit()]
    if len(found) != len(text.split(",")) or len(found) not in (1, lengths):
        raise ValueError(f"{flag}: expected a count, or {lengths} with commas, got {text!r}")
    return found * (lengths // len(found))


def some_of(flag: str, text: str, allowed: Any) -> list[str]:
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in allowed]:
        raise ValueError(f"{flag}: {unknown[0]!r} is none of {', '.join(allowed)}")
    return chosen


# Speed -------------------------------------------------------------------------------------------


def server(args: argparse.Namespace, stock: bool, tokens: int, *flags: str) -> Server:
    flags += ("--max-total-tokens", str(tokens // PAGE * PAGE), "--page-size", str(PAGE))
    flags += ("--chunked-prefill-size", str(args.chunk), "--enable-metrics", "--dtype", args.dtype)
    kind = ("--attention-backend", "torch_native") if stock else ("--kv-compression", "none")
    return Server(args.model, *flags, *kind, start_timeout_s=600)


def speed_of_server(args: argparse.Namespace, policy: Policy | None) -> dict[str, Any]:
    """As decode_speed.py does, with memory beside it."""
    from sglang_kv.planner.find import find_model
    from sglang_kv.planner.memory import token_bytes

    tokens = args.batch * (args.context + args.steps + 64) + args.chunk
    flags = ("--max-running-requests", str(max(8, args.batch)), "--disable-radix-cache")
    per_token = token_bytes(
        find_model(str(args.model)).caches, {"bfloat16": "bf16"}.get(args.dtype, "fp32")
    )
    with server(args, policy is None, tokens, *flags, "--decode-log-interval", "4") as running:
        proved = prove_engine(running, compressing=policy is not None)
        run_batch(running, [[5] * 64] * 2, policy, 8)  # first calls build and warm up
        with Watch(running, per_token) as watch:
            row = measure(running, args.batch, args.context, args.steps, policy, args.seed)
        full = [use.kv_bytes for use in watch.samples if use.running == args.batch]
        peak = peak_rss_bytes(running)
    held = int(statistics.median(full[len(full) // 2 :])) if full else None
    more = {"kv_bytes": held, "kv_dtype": args.dtype, "peak_rss_bytes": peak}
    return {**row, **more, "proved": proved}


def speed_of_kvpress(args: argparse.Namespace, arm: str) -> dict[str, Any]:
    press = press_for(args.pairs[arm], str(args.model))
    if press and press["class"] == EAGER:
        heads = json.loads((args.model / "config.json").read_text())["num_attention_heads"]
        # One layer's attention weights, and their fp32 softmax.
        needed = args.batch * heads * args.context**2 * (2 + 4)
        if needed > memory_available_bytes() // 2:
            return {"failed": f"eager attention needs {needed / 2**30:.0f} GiB", "press": press}
    prompts = random_prompts(args.batch, args.context, args.seed)
    job = kvpress_job(args, {arm: press}) | {"speed": {"prompts": prompts, "steps": args.steps}}
    found = outside(args, "kvpress", job, kept=False)
    return {**found["speed"], "press": press, "versions": found["versions"]}


def memory_available_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def speed_of_llama_cpp(args: argparse.Namespace) -> dict[str, Any]:
    gguf = args.work / f"{args.model.name}.{args.gguf_dtype}.gguf"
    if not gguf.exists():
        args.work.mkdir(parents=True, exist_ok=True)
        convert(args.model, gguf, args.gguf_dtype)
    prompts = random_prompts(args.batch, args.context, args.seed)
    job = {"gguf": str(gguf), "prompts": prompts, "steps": args.steps, "threads": args.threads}
    found = outside(args, "llama.cpp", {**job, "chunk": min(args.chunk, 2048)}, kept=False)
    found.pop("output_ids")
    return {**found, "weights": args.gguf_dtype}


def speed_rows(args: argparse.Namespace, add: Callable[..., None]) -> None:
    names = ("batch", "context", "steps", "threads", "chunk", "dtype", "keep_ratio")
    settings = {name: getattr(args, name) for name in names}
    for engine in args.engines:
        for arm in args.arms if engine in ("sglang-kv", "kvpress") else ["none"]:
            if engine == "kvpress" and not args.pairs[arm].theirs:
                continue
            make: Callable[[], dict[str, Any]] = {
                "stock": partial(speed_of_server, args, None),
                "sglang-kv": partial(speed_of_server, args, args.pairs[arm].at(args.context)),
                "kvpress": partial(speed_of_kvpress, args, arm),
                "llama.cpp": partial(speed_of_llama_cpp, args),
            }[engine]
            add("speed", engine, arm, settings, make)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    for engine in RUNNERS:
        if args.install and engine in args.engines:
            install(engine, args.folders[engine])
    written = args.results.read_text().splitlines() if args.results.exists() else []
    known = set() if args.again else {json.loads(line).get("key") for line in written}

    def add(part: str, engine: str, arm: str, settings: Any, make: Callable[[], Any]) -> None:
        about = {"part": part, "engine": engine, "arm": arm, "policy": args.pairs[arm].policy}
        about |= {"settings": settings, "model": args.model.name, "seed": args.seed}
        weights = args.gguf_dtype if engine == "llama.cpp" else None
        text = json.dumps([about, environment()["commit"], weights], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        if key in known:
            return
        try:
            row = make()
        except subprocess.CalledProcessError as error:  # out of memory, for one
            row = {"failed": f"exit status {error.returncode}"}
        record("peers", {"key": key, **about, **row}, args.results)

    if "speed" in args.part:
        speed_rows(args, add)
    if "quality" in args.part:
        peers_quality.rows(args, add, server)


if __name__ == "__main__":
    main()
