"""Beside others, with the same model and prompts: kvpress, stock SGLang, llama.cpp.

    python benchmarks/peers.py --model MODEL --kvpress ../kvpress-env --llama-cpp ../llama-env

`speed`: a batch decodes together, as in decode_speed.py; step, prefill, bytes of KV in decode,
peak resident memory of the process that holds the model. `quality`: needles, each engine asked the
same token ids, the question in the prompt, the same share of it kept; how many answers are the same
token for token. kvpress and llama.cpp have environments of their own, in folders outside the
checkout (`--install` makes them). llama.cpp gets the same weights, converted by gguf_model.py.
One JSON line per engine and arm; rows that lose stay. Run it on a quiet machine.

Where definitions differ: kvpress drops once, after the prompt, while `h2o` here goes on in decode;
it averages a token's attention over the queries that see it, where H2O sums. Its PyramidKV counts
the window in the budget, and falls back to equal layers where the last would get less than that.
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

from sglang_kv.benchmarks import needle
from sglang_kv.benchmarks.arms import Asker, work_folder
from sglang_kv.benchmarks.common import environment, record, results_file
from sglang_kv.benchmarks.decode_speed import measure, random_prompts, run_batch
from sglang_kv.benchmarks.gguf_model import convert
from sglang_kv.benchmarks.methods import NONE, PAGE, Policy
from sglang_kv.benchmarks.peers_outside import RUNNERS, install, outside, python_of
from sglang_kv.benchmarks.prompts import Chat, Haystack, load_text
from sglang_kv.benchmarks.server import Server, generate_body
from sglang_kv.benchmarks.watch import Watch, peak_rss_bytes, prove_engine
from sglang_kv.compression import parse_policy

PARTS = ("speed", "quality")


def arms(keep_ratio: float) -> dict[str, tuple[Policy, dict[str, Any] | None]]:
    """Each arm's policy, and kvpress's press for the same, parameters taken from the policy."""
    kept = {"keep_ratio": keep_ratio}
    found: dict[str, tuple[Policy, dict[str, Any] | None]] = {"none": (NONE, None)}
    for name, extra in (("snapkv", {}), ("snapkv wide", {"window": 16, "kernel_size": 31})):
        policy: Policy = {"method": "snapkv", **kept, **extra}
        found[name] = policy, {"class": "SnapKVPress", **kept, **window_of(policy)}
    policy = {"method": "pyramidkv", **kept}
    beta = parse_policy(policy).parameters["beta"]
    press = {"class": "PyramidKVPress", **kept, **window_of(policy), "beta": beta}
    found["pyramidkv"] = policy, press
    found["h2o"] = {"method": "h2o", **kept}, {"class": "ObservedAttentionPress", **kept}
    return found


def window_of(policy: Policy) -> dict[str, Any]:
    parameters = parse_policy(policy).parameters
    return {"window_size": parameters["window"], "kernel_size": parameters["kernel_size"]}


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
    parser.add_argument("--seed", type=int, default=0)
    speed = parser.add_argument_group("speed")
    speed.add_argument("--batch", type=int, default=8)
    speed.add_argument("--context", type=int, default=4000)
    speed.add_argument("--steps", type=int, default=48, help="decoded tokens per request")
    speed.add_argument("--gguf-dtype", default="bf16", help="%(default)s or f16")
    quality = parser.add_argument_group("quality")
    quality.add_argument("--lengths", default="1024,2048", help="prompt tokens")
    quality.add_argument("--depths", default="0.1,0.3,0.5,0.7,0.9")
    quality.add_argument("--samples", type=int, default=5, help="per length and depth")
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
    for name in ("threads", "chunk", "batch", "context", "samples"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.steps < 3:
        raise ValueError(f"--steps must be at least 3, got {args.steps}")
    args.lengths = [int(n) for n in args.lengths.split(",")]
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


def some_of(flag: str, text: str, allowed: Any) -> list[str]:
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in allowed]:
        raise ValueError(f"{flag}: {unknown[0]!r} is none of {', '.join(allowed)}")
    return chosen


# Speed -------------------------------------------------------------------------------------------


def server(args: argparse.Namespace, stock: bool, tokens: int, *flags: str) -> Server:
    flags += ("--max-total-tokens", str(tokens // PAGE * PAGE), "--page-size", str(PAGE))
    flags += ("--chunked-prefill-size", str(args.chunk), "--enable-metrics", "--dtype", "bfloat16")
    kind = ("--attention-backend", "torch_native") if stock else ("--kv-compression", "none")
    return Server(args.model, *flags, *kind)


def speed_of_server(args: argparse.Namespace, policy: Policy | None) -> dict[str, Any]:
    """As decode_speed.py does, with memory beside it."""
    from sglang_kv.planner.find import find_model
    from sglang_kv.planner.memory import token_bytes

    tokens = args.batch * (args.context + args.steps + 64) + args.chunk
    flags = ("--max-running-requests", str(max(8, args.batch)), "--disable-radix-cache")
    per_token = token_bytes(find_model(str(args.model)).caches, "bf16")
    with server(args, policy is None, tokens, *flags, "--decode-log-interval", "4") as running:
        proved = prove_engine(running, compressing=policy is not None)
        run_batch(running, [[5] * 64] * 2, policy, 8)  # first calls build and warm up
        with Watch(running, per_token) as watch:
            row = measure(running, args.batch, args.context, args.steps, policy, args.seed)
        full = [use.kv_bytes for use in watch.samples if use.running == args.batch]
        peak = peak_rss_bytes(running)
    held = int(statistics.median(full[len(full) // 2 :])) if full else None
    more = {"kv_bytes": held, "kv_dtype": "bfloat16", "peak_rss_bytes": peak}
    return {**row, **more, "proved": proved}


def speed_of_kvpress(args: argparse.Namespace, press: dict[str, Any] | None) -> dict[str, Any]:
    if press and press["class"] == "ObservedAttentionPress":
        heads = json.loads((args.model / "config.json").read_text())["num_attention_heads"]
        # One layer's attention weights, and their fp32 softmax.
        needed = args.batch * heads * args.context**2 * (2 + 4)
        if needed > memory_available_bytes() // 2:
            return {"failed": f"eager attention needs {needed / 2**30:.0f} GiB", "press": press}
    prompts = random_prompts(args.batch, args.context, args.seed)
    job = kvpress_job(args, press) | {"speed": {"prompts": prompts, "steps": args.steps}}
    found = outside(args, "kvpress", job)
    return {**found["speed"], "press": press, "versions": found["versions"]}


def memory_available_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def kvpress_job(args: argparse.Namespace, press: dict[str, Any] | None) -> dict[str, Any]:
    about = {"model": str(args.model), "dtype": "bfloat16", "threads": args.threads}
    return {**about, "press": press, "answers": [], "speed": None}


def speed_of_llama_cpp(args: argparse.Namespace) -> dict[str, Any]:
    gguf = args.work / f"{args.model.name}.{args.gguf_dtype}.gguf"
    if not gguf.exists():
        args.work.mkdir(parents=True, exist_ok=True)
        convert(args.model, gguf, args.gguf_dtype)
    prompts = random_prompts(args.batch, args.context, args.seed)
    job = {"gguf": str(gguf), "prompts": prompts, "steps": args.steps, "threads": args.threads}
    found = outside(args, "llama.cpp", {**job, "chunk": min(args.chunk, 2048)})
    found.pop("output_ids")
    return {**found, "weights": args.gguf_dtype}


def speed_rows(args: argparse.Namespace, add: Callable[..., None]) -> None:
    settings = {name: getattr(args, name) for name in ("batch", "context", "steps", "threads")}
    for engine in args.engines:
        for arm in args.arms if engine in ("sglang-kv", "kvpress") else ["none"]:
            policy, press = args.pairs[arm]
            make: Callable[[], dict[str, Any]] = {
                "stock": partial(speed_of_server, args, None),
                "sglang-kv": partial(speed_of_server, args, policy),
                "kvpress": partial(speed_of_kvpress, args, press),
                "llama.cpp": partial(speed_of_llama_cpp, args),
            }[engine]
            add("speed", engine, arm, settings, make)


# Quality -----------------------------------------------------------------------------------------


def quality_rows(args: argparse.Namespace, add: Callable[..., None]) -> None:
    chat = Chat.load(str(args.model))
    story = Haystack(chat, load_text(args.text))
    cases = needle.make_cases(
        chat, story, args.lengths, args.depths, args.samples, args.seed,
        kinds=["number"], limit=args.limit,
    )  # fmt: skip
    settings = {name: getattr(args, name) for name in ("lengths", "depths", "samples", "limit")}
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def ours(arm: str, ask: Asker) -> list[dict[str, Any]]:
        policy, found = args.pairs[arm][0], []
        for case in cases:
            body = generate_body(case.prompt_ids, policy, max_new_tokens=case.max_new_tokens)
            answer = ask(f"peers {arm} {case.id}", body, lambda raw: {})
            found.append({"id": case.id, "output_ids": answer["output_ids"]})
        return found

    if "sglang-kv" in args.engines:
        pool = 2 * max(args.lengths) + args.chunk
        with server(args, False, pool) as running:
            ask = Asker(running, args.work, {"commit": environment()["commit"]})
            ask.start("sglang-kv", len(cases) * len(args.arms))
            for arm in args.arms:
                lines["sglang-kv", arm] = ours(arm, ask)
    for arm in args.arms if "kvpress" in args.engines else []:
        wanted = [
            {key: case.to_json()[key] for key in ("id", "prompt_ids", "max_new_tokens")}
            for case in cases
        ]
        job = kvpress_job(args, args.pairs[arm][1]) | {"answers": wanted}
        lines["kvpress", arm] = outside(args, "kvpress", job)["answers"]
    for (engine, arm), said in lines.items():
        full = needle.score_answers(chat, cases, lines.get((engine, "none"), said))
        summary = needle.summarize(cases, needle.score_answers(chat, cases, said), full)
        other = lines.get(("kvpress" if engine == "sglang-kv" else "sglang-kv", arm))
        same = other and sum(a == b for a, b in zip(said, other, strict=True))
        row = {**summary, "same_answers": same, "n": len(cases)}
        add("quality", engine, arm, settings, lambda row=row: row)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    for engine in RUNNERS:
        if args.install and engine in args.engines:
            install(engine, args.folders[engine])
    written = args.results.read_text().splitlines() if args.results.exists() else []
    known = set() if args.again else {json.loads(line).get("key") for line in written}

    def add(part: str, engine: str, arm: str, settings: Any, make: Callable[[], Any]) -> None:
        about = {"part": part, "engine": engine, "arm": arm, "policy": args.pairs[arm][0]}
        about |= {"settings": settings, "model": args.model.name, "seed": args.seed}
        text = json.dumps([about, environment()["commit"]], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        if key in known:
            return
        try:
            row = make()
        except subprocess.CalledProcessError as error:  # out of memory, for one
            row = {"failed": f"exit status {error.returncode}"}
        record("peers", {"key": key, **about, **row}, args.results)

    for part in args.part:
        {"speed": speed_rows, "quality": quality_rows}[part](args, add)


if __name__ == "__main__":
    main()
