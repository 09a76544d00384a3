"""SGLang's own load generator, `sglang.benchmark.serving`, on our requests and on uvloop.

It is driven in this process, with three things set around it:

- uvloop's policy. By itself it runs plain asyncio, whose cost on the machine under test is charged
  to the server. The class of the loop that ran stands in the result.
- A dataset of our requests, so that lengths are exact and nothing is downloaded.
- The policy inside each request's whole ``sampling_params``: what a request adds replaces that
  object, the number of new tokens in it included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_kv.benchmarks.workloads import Request

DATASET = "sglang-kv"
NO_TOKEN = "no token came: the server refused the request in its stream; its log says why"
LATENCIES = ("ttft", "tpot", "itl", "e2e_latency")


class AllFailed(Exception):
    """No request of a workload was served; the first one's error."""


def import_load_generator() -> None:
    """Many seconds of imports, which would else be charged to the first arm."""
    with warnings.catch_warnings():
        # Of kernels that the machine cannot run: the client runs none.
        warnings.simplefilter("ignore")
        import sglang.benchmark.serving  # noqa: F401


def drive(
    url: str,
    model: str,
    requests: Sequence[Request],
    policy: dict[str, Any] | None,
    *,
    rate: float = float("inf"),
    concurrency: int | None = None,
    seed: int = 0,
    log: Path | None = None,
    bar: bool = False,
) -> dict[str, Any]:
    """Send the requests, and report what the load generator measured.

    Args:
        url: of a server that runs.
        model: path or name, for the tokenizer.
        requests: ids to ``/generate``; sessions' messages to ``/v1/chat/completions``.
        policy: of every request; None: the server's default, or a server without the plugin.
        rate: requests per second, Poisson; infinite: all at once.
        concurrency: most requests on their way at a time.
        log: where the load generator's own output goes.
        bar: whether its progress bar is shown.

    Returns:
        Figures with units in their names; ``itls`` are each request's gaps between tokens, s.

    Raises:
        AllFailed: no request was served.
    """
    from sglang.benchmark import serving

    chat = not isinstance(requests[0].prompt[0], int)
    backend = "sglang-oai-chat" if chat else "sglang"
    args = arguments(url, model, backend, len(requests), rate, concurrency, seed, bar)
    seen = Seen()
    with (
        on_uvloop(),
        seen.by(serving.ASYNC_REQUEST_FUNCS, backend),
        our_dataset(requests, policy, chat),
        output_to(log),
    ):
        try:
            raw = serving.run_benchmark(args)
        except IndexError:  # its percentiles of no latency at all
            if seen.succeeded or not seen.errors:
                raise
            raise AllFailed(seen.errors[0]) from None
    (loop,) = seen.loops
    return {"loop": loop, "backend": backend, **figures(raw)}


def arguments(
    url: str,
    model: str,
    backend: str,
    count: int,
    rate: float,
    concurrency: int | None,
    seed: int,
    bar: bool,
) -> argparse.Namespace:
    """What the load generator's command line would have made of these."""
    return argparse.Namespace(
        backend=backend,
        base_url=url,
        host="127.0.0.1",
        port=None,
        ready_check_timeout_sec=60,
        dataset_name=DATASET,
        dataset_path="",
        model=model,
        served_model_name=None,
        tokenizer=model,
        num_prompts=count,
        request_rate=rate,
        max_concurrency=concurrency,
        seed=seed,
        output_file=os.devnull,
        output_details=False,
        disable_tqdm=not bar,
        cache_report=True,
        # The server was warmed up, with the same policy, and its cache flushed.
        warmup_requests=0,
        flush_cache=False,
        disable_stream=False,
        disable_ignore_eos=False,
        extra_request_body=None,
        return_logprob=False,
        return_routed_experts=False,
        apply_chat_template=False,
        profile=False,
        pd_separated=False,
        plot_throughput=False,
        goodput=None,
        header=None,
        tag=None,
        lora_name=None,
        lora_request_distribution=None,
        lora_zipf_alpha=1.5,
        sharegpt_output_len=None,
        sharegpt_context_len=None,
        random_input_len=None,
        random_output_len=None,
        random_range_ratio=None,
    )


def extra_body(policy: dict[str, Any] | None, output_tokens: int, chat: bool) -> dict[str, Any]:
    """What one request adds to the body that the load generator makes."""
    custom = {} if policy is None else {"custom_params": {"kv_compression": policy}}
    if chat:
        return custom
    sampling = {"temperature": 0.0, "max_new_tokens": output_tokens, "ignore_eos": True}
    return {"sampling_params": {**sampling, **custom}}


def figures(raw: dict[str, Any]) -> dict[str, Any]:
    """The load generator's result in our names, rounded."""
    prompt_tokens = sum(
        n for n, error in zip(raw["input_lens"], raw["errors"], strict=True) if not error
    )
    found: dict[str, Any] = {
        "completed": raw["completed"],
        "failed": sum(bool(error) for error in raw["errors"]),
        "duration_s": round(raw["duration"], 3),
        "prompt_tokens": prompt_tokens,
        "output_tokens": raw["total_output_tokens"],
        "requests_per_s": round(raw["request_throughput"], 4),
        "output_tok_s": round(raw["output_throughput"], 2),
        "total_tok_s": round((prompt_tokens + raw["total_output_tokens"]) / raw["duration"], 2),
    }
    for name in LATENCIES:
        found[f"{name.removesuffix('_latency')}_ms"] = {
            "mean": round(float(raw[f"mean_{name}_ms"]), 2),
            "p50": round(float(raw[f"median_{name}_ms"]), 2),
            "p99": round(float(raw[f"p99_{name}_ms"]), 2),
        }
    found["hit_rate"] = round(raw["cache_report"]["cache_hit_rate_pct"] / 100, 4)
    found["error"] = next((error for error in raw["errors"] if error), None)
    found["itls"] = raw["itls"]
    return found


@contextlib.contextmanager
def on_uvloop() -> Iterator[None]:
    """Loops that start inside are uvloop's."""
    import uvloop

    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(before)


@dataclass
class Seen:
    """What the load generator does not tell: the loop that it ran on, and why requests failed."""

    loops: set[str] = field(default_factory=set)
    succeeded: int = 0
    errors: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def by(self, functions: dict[str, Any], backend: str) -> Iterator[None]:
        """Watch each request of one of the load generator's backends."""
        original = functions[backend]

        async def watched(request_func_input: Any, pbar: Any = None) -> Any:
            loop = type(asyncio.get_running_loop())
            self.loops.add(f"{loop.__module__}.{loop.__qualname__}")
            output = await original(request_func_input=request_func_input, pbar=pbar)
            if output.success and not output.generated_text:
                # SGLang refuses a stream with status 200 and an event that is an error, which the
                # load generator counts as served, with all the tokens that were asked for.
                output.success, output.error = False, NO_TOKEN
            if output.success:
                self.succeeded += 1
            else:
                self.errors.append(output.error)
            return output

        functions[backend] = watched
        try:
            yield
        finally:
            functions[backend] = original


@contextlib.contextmanager
def our_dataset(
    requests: Sequence[Request], policy: dict[str, Any] | None, chat: bool
) -> Iterator[None]:
    """The requests, under a dataset's name in the load generator."""
    from sglang.benchmark import datasets

    class OurRequests(datasets.common.BaseDataset):
        @classmethod
        def from_args(cls, args: argparse.Namespace) -> OurRequests:
            return cls()

        def load(self, tokenizer: Any, model_id: str | None = None) -> list[Any]:
            return [
                datasets.DatasetRow(
                    prompt=request.prompt,
                    prompt_len=request.prompt_tokens,
                    output_len=request.output_tokens,
                    extra_request_body=extra_body(policy, request.output_tokens, chat),
                )
                for request in requests
            ]

    datasets.DATASET_MAPPING[DATASET] = OurRequests
    try:
        yield
    finally:
        del datasets.DATASET_MAPPING[DATASET]


@contextlib.contextmanager
def output_to(log: Path | None) -> Iterator[None]:
    """What is printed inside goes to the end of a file, or nowhere."""
    with (
        (log or Path(os.devnull)).open("a") as file,
        contextlib.redirect_stdout(file),
    ):
        yield
