"""The endless stream from its command line to its last line, without a server."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fake_server import FakeServer, Run, refused, runner

from sglang_kv.benchmarks import endless_figures, endless_stream, records

PERPLEXITY = ("--perplexity", "--tokens", "300")


class Streaming(FakeServer):
    """Every token has a chance of one half; what is read last, one of a quarter."""

    step_s = 0.02
    metrics: ClassVar = {
        "sglang_kv:head_pages_used": 700.0,
        "sglang_kv:head_pages_evictable": 100.0,
    }

    def stream(self, path: str, body: dict[str, Any], timeout_s: float = 0) -> Iterator[Any]:
        held = {"logical_tokens": len(body["input_ids"]) + 59, "kept_tokens": 64}
        for count, event in enumerate(super().stream(path, body, timeout_s), 1):
            yield event | {"meta_info": {"completion_tokens": count, "kv_compression": held}}

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 0) -> Any:
        assert body["logprob_start_len"] == 0
        self.prompts.append(body["input_ids"])
        self.asked.append(body["sampling_params"]["custom_params"]["kv_compression"])
        entries = [[-math.log(2), 7, None]] * (len(body["input_ids"]) - 1)
        return {"meta_info": {"input_token_logprobs": [[None, 7, None], *entries]}}

    def generate(self, prompt: list[int], policy: Any = None, **options: Any) -> dict[str, Any]:
        answer = super().generate(prompt, policy, **options)
        predicted = [[-math.log(4), 7, None]] * endless_stream.RUN
        answer["meta_info"]["input_token_logprobs"] = [[None, 7, None], *predicted]
        return answer


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(endless_stream, "Server", Streaming)
    monkeypatch.setattr(endless_stream, "BUCKET", 100)
    monkeypatch.setattr(endless_stream, "WARM_UP", 10)
    monkeypatch.setattr(endless_stream, "RUN", 4)
    monkeypatch.setattr(records, "FOLDER", tmp_path / "results")
    return runner(tmp_path / "results", monkeypatch)


@pytest.fixture
def flags(demo_model: Path, tmp_path: Path) -> tuple[str, ...]:
    book = tmp_path / "book.txt"
    book.write_text("It was a book of few words. " * 20)
    window = ("--sinks", "4", "--recent", "60", "--chunk", "64")
    return ("--model", str(demo_model), "--text", str(book), "--tokens", "250", *window)


def test_memory_and_speed(run: Run, flags: tuple[str, ...]) -> None:
    (row,) = run(endless_stream, *flags, "--decode", "60")
    assert (row["arm"], row["text"], row["tokens"]) == ("memory and speed", "book.txt", 250)
    assert row["logical_tokens"] == row["expected_logical_tokens"] == 250 + 59
    assert row["most_head_pages"] == 600
    assert row["bound_head_pages"] > 0
    assert row["most_head_pages_in_decode"] == 600
    assert 0 < row["bound_head_pages_in_decode"] < row["bound_head_pages"]
    assert row["tokens_compared"] == 50
    assert row["last_to_first"] == pytest.approx(1, abs=0.5)
    assert row["rss_in_prompt_mib"] is None  # it took less than the samples' first 20 s
    assert row["rss_in_decode_mib"]["most"] > 0
    bound = row["bound_head_pages_in_decode"]
    said = f"| most head pages in decode | 600; computed beforehand: at most {bound:,} |"
    assert said in endless_figures.table().splitlines()
    (server,) = FakeServer.started
    assert [len(prompt) for prompt in server.prompts] == [128, 250]
    assert server.flushed == 1


def test_perplexity(run: Run, flags: tuple[str, ...]) -> None:
    more = ("--without-sinks", "150", "--samples", "3")
    stream, without, anew = run(endless_stream, *flags, *PERPLEXITY, *more)
    assert [row["arm"] for row in (stream, without, anew)] == [
        *("4 sinks", "no sinks", "recomputed window")
    ]
    assert (stream["perplexity"], without["perplexity"]) == ([2.0] * 3, [2.0] * 2)
    assert [row["tokens"] for row in (stream, without, anew)] == [300, 150, 300]
    both = {"ppl": 2.0, "full_ppl": 4.0, "ratio": 0.5, "ratio_interval": [0.5, 0.5]}
    assert anew["beside_stream"] == {"n": 6, **both}
    assert anew["beside_stream_first_half"] == anew["beside_stream_second_half"] == {"n": 3, **both}
    (server,) = FakeServer.started
    assert [policy["sinks"] for policy in server.asked[:2] if policy] == [4, 0]
    # A window of 64 and the four tokens that are judged: three in each bucket but the first.
    assert [len(prompt) for prompt in server.prompts[2:]] == [68] * 6
    ids = server.prompts[0]
    for at, prompt in zip(endless_stream.places(300, 3), server.prompts[2:], strict=True):
        assert prompt == ids[at - 64 : at + 4]
    assert endless_figures.table().splitlines()[-1] == (
        "| perplexity beside a recomputed window, the same 24 tokens at 6 places | "
        "2.0 beside 4.0 (0.500x, 0.500 - 0.500); "
        "0.500x in the first half of the stream, 0.500x in the second |"
    )
    figure = endless_figures.figure()
    assert figure is not None
    assert [series.label for series in figure.series] == ["4 sinks", "no sinks"]


def test_the_same_tokens_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token i costs i / 1000 in the stream and twice that in a window that is recomputed."""
    monkeypatch.setattr(endless_stream, "BUCKET", 100)
    monkeypatch.setattr(endless_stream, "RUN", 4)

    class Server:
        def generate(self, prompt: list[int], *rest: Any, **more: Any) -> dict[str, Any]:
            assert more["logprob_start_len"] == 63
            entries = [[-2 * token / 1000, token, None] for token in prompt[64:]]
            return {"meta_info": {"input_token_logprobs": [[None, prompt[63], None], *entries]}}

    ids, losses = list(range(300)), [token / 1000 for token in range(1, 300)]
    row = endless_stream.recomputed(Server(), ids, losses, 64, 5)  # type: ignore[arg-type]
    places = endless_stream.places(300, 5)
    assert all(100 <= at < 296 for at in places)
    assert len(places) == row["beside_stream"]["n"] == 10
    mean = sum(at + 1.5 for at in places) / len(places) / 1000
    assert row["beside_stream"]["ppl"] == pytest.approx(math.exp(mean), abs=1e-3)
    assert row["beside_stream"]["full_ppl"] == pytest.approx(math.exp(2 * mean), abs=1e-3)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--decode", "19"], "--decode: must be at least 20, got 19"),
        (["--perplexity", "--tokens", "299"], "--tokens: must be at least 300 with --perplexity"),
        ([*PERPLEXITY, "--samples", "0"], "--samples: must be at least 1, got 0"),
        (["--perplexity", "--recent", "96"], "--sinks, --recent: must be less than 100 together"),
        (["--text", "nowhere.txt"], "--text: nowhere.txt: no such file"),
    ],
)
def test_what_would_fail_in_the_end_is_refused_at_once(
    run: Run,
    flags: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    said: str,
) -> None:
    assert said in refused(endless_stream, run, capsys, *flags, *more)
