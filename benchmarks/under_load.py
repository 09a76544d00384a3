"""One arm under one workload: a server, a warm-up, a flushed cache, the load, and the proof."""

from __future__ import annotations

import argparse
import shlex
import sys
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sglang_kv.benchmarks import methods
from sglang_kv.benchmarks.arms import Remote
from sglang_kv.benchmarks.load import drive
from sglang_kv.benchmarks.proof import prove_policy
from sglang_kv.benchmarks.server import Server, generate_body
from sglang_kv.benchmarks.watch import Counters, Watch, pool_bytes, prove_engine, wait_for
from sglang_kv.benchmarks.workloads import Request, Workload, make_requests
from sglang_kv.compression import Geometry, parse_policy

WARM_UP_TOKENS = 256
#: The pool holds so many of the longest requests, if --pool-mib does not say.
ROOM = 4


#: What SGLang's ``--dtype`` and ``--kv-cache-dtype`` make of the KV, as the planner calls it. The
#: dtype of a checkpoint itself is one of 16 bits: SGLang serves those of 32 bits in 16.
KV_DTYPES = {
    **dict.fromkeys(("auto", "bfloat16", "bf16", "float16", "half"), "bf16"),
    **dict.fromkeys(("float32", "float"), "fp32"),
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2"), "fp8"),
}


def kv_dtype_of(dtype: str, kv_cache_dtype: str = "auto") -> str:
    """The planner's name of a KV dtype of this size.

    Raises:
        ValueError: its size is not known, so equal memory cannot be given to all arms.
    """
    flags = {"--kv-cache-dtype": kv_cache_dtype, "--dtype": dtype}
    flag, value = next(((f, v) for f, v in flags.items() if v != "auto"), ("--dtype", "auto"))
    value = value.removeprefix("torch.")
    if value not in KV_DTYPES:
        raise ValueError(f"{flag}: {value!r}: expected one of {', '.join(KV_DTYPES)}")
    return KV_DTYPES[value]


def kv_cache_dtype_in(server_args: str) -> str:
    """What further flags of a server say of its KV's dtype; the last one counts.

    Raises:
        ValueError: the flag has no value, the text no end, or a flag stands there that is ours.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--dtype")
    try:
        found = parser.parse_known_args(shlex.split(server_args))[0]
    except (argparse.ArgumentError, ValueError) as error:
        raise ValueError(f"--server-args: {error}") from None
    if found.dtype is not None:
        raise ValueError("--server-args: --dtype is a flag of this command")
    return str(found.kv_cache_dtype)


@dataclass(frozen=True)
class Target:
    """What all arms have in common: the model, and the memory it gets."""

    model: str
    token_bytes: int
    geometry: Geometry
    trained: int | None

    @classmethod
    def of(cls, model: str, dtype: str = "auto", kv_cache_dtype: str = "auto") -> Target:
        """A model as a server has it.

        Args:
            model: path or name.
            dtype: ``--dtype`` of the server.
            kv_cache_dtype: its ``--kv-cache-dtype``.

        Raises:
            ValueError: the size of such KV is not known.
        """
        from sglang_kv.planner.find import find_model
        from sglang_kv.planner.memory import token_bytes

        found = find_model(model)
        kv_dtype = kv_dtype_of(dtype, kv_cache_dtype)
        return cls(
            model, token_bytes(found.caches, kv_dtype), methods.geometry_of(model), found.context
        )

    def pool_tokens(self, args: argparse.Namespace) -> int:
        """Tokens of full KV in every arm's memory."""
        if args.pool_mib is not None:
            tokens = int(args.pool_mib * 2**20) // self.token_bytes
        else:
            tokens = ROOM * max(w.longest for w in args.workloads) + args.chunk
        return tokens // methods.PAGE * methods.PAGE

    def drops(self, policy: methods.Policy, requests: list[Any]) -> bool | None:
        """Whether the policy must drop something of these requests; None: it may.

        Of an agent's session only the first round's length is known beforehand.
        """
        if policy["method"] == "none":
            return False
        for request in requests:
            plan = methods.plan_of(policy, self.geometry, request.prompt_tokens)
            computed = request.prompt_tokens + request.output_tokens - 1
            if plan.kept_tokens(computed) + 2 * methods.PAGE < computed:
                return True
        return None


def server_flags(args: argparse.Namespace, target: Target) -> tuple[list[str], dict[str, str]]:
    """Flags and environment that every arm's server gets."""
    flags = ["--max-total-tokens", str(target.pool_tokens(args)), "--page-size", str(methods.PAGE)]
    flags += ["--max-running-requests", str(args.max_running_requests)]
    flags += ["--chunked-prefill-size", str(args.chunk), "--dtype", args.dtype]
    flags += ["--enable-metrics", "--decode-log-interval", "8", *shlex.split(args.server_args)]
    longest = max(w.longest for w in args.workloads)
    if target.trained is None or longest <= target.trained:
        return flags, {}
    allow = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    return [*flags, "--context-length", str(longest + 64)], allow


@contextmanager
def serving(args: argparse.Namespace, target: Target, stock: bool) -> Iterator[Server]:
    if args.base_url:
        yield Remote(args.base_url)
        return
    flags, env = server_flags(args, target)
    if not stock:
        flags += ["--kv-compression", "none"]
    elif args.device == "cpu":
        flags += ["--attention-backend", "torch_native"]
    with Server(target.model, *flags, env=env, device=args.device, start_timeout_s=900) as server:
        yield server


def flush(server: Server) -> None:
    """Empty the prefix cache; a server refuses while its last request has not quite ended."""

    def flushed() -> bool:
        try:
            server.flush()
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
            return False
        return True

    if not wait_for(flushed, 30):
        raise SystemExit(f"{server.url} does not become idle, so its cache cannot be flushed")


def measure(
    args: argparse.Namespace,
    server: Server,
    target: Target,
    workload: Workload,
    policy: methods.Policy | None,
    encode: Any,
) -> dict[str, Any]:
    """One arm under one workload, warmed up, flushed and proved.

    Raises:
        NotProved: the server did not run what was asked.
        HTTPError, AllFailed: it refuses such requests.
    """
    engine = prove_engine(server, compressing=policy is not None)
    before = Counters.settled(server, parse_policy(policy).name) if policy else None
    requests = make_requests(workload, encode, args.seed)

    def load(sent: list[Request], **options: Any) -> dict[str, Any]:
        return drive(server.url, target.model, sent, policy, log=args.log, **options)

    # First calls build and warm up: one request whose answer is the proof, then two at a time.
    small = make_requests(warm_up(workload), encode, args.seed + 1)
    body = generate_body(small[0].ids, policy, max_new_tokens=8, ignore_eos=True)
    report = prove_policy(server.post("/generate", body), policy)
    warmed = load(small)
    flush(server)
    if before:
        before.prove(server, served_by(warmed, first=1), drops=None)
        before = Counters.settled(server, before.method)
    with Watch(server, target.token_bytes) as watch:
        row = load(requests, rate=args.rate, seed=args.seed, bar=sys.stderr.isatty())
    proved = {**engine, "policy": report and {k: report[k] for k in ("method", "parameters")}}
    if before and policy:
        proved |= before.prove(server, served_by(row), target.drops(policy, requests))
    gaps = row.pop("itls")
    row |= watch.row()
    row |= {"pool_bytes": pool_bytes(server, target.token_bytes), "token_bytes": target.token_bytes}
    if workload.name == "stream" and gaps[0]:
        row |= speed_over_time(gaps[0])
    return {**row, "proved": proved}


def served_by(row: dict[str, Any], first: int = 0) -> range:
    """How many requests a server may have counted: one that failed may have been served."""
    least = first + int(row["completed"])
    return range(least, least + int(row["failed"]) + 1)


def warm_up(workload: Workload) -> Workload:
    """Two small requests of the same kind."""
    small = {"context": WARM_UP_TOKENS, "output": 8, "question": 32, "turns": 2}
    most = {size: min(value, getattr(workload, size)) for size, value in small.items()}
    return replace(workload, requests=2, groups=1, **most)


def speed_over_time(gaps_s: list[float]) -> dict[str, float]:
    """Decode speed of one request's first and last quarter of tokens."""
    quarter = max(1, len(gaps_s) // 4)
    first, last = quarter / sum(gaps_s[:quarter]), quarter / sum(gaps_s[-quarter:])
    return {
        "tok_s_first_quarter": round(first, 2),
        "tok_s_last_quarter": round(last, 2),
        "last_to_first": round(last / first, 4),
    }
