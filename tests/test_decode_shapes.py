"""The sweep over contexts and pages: what is measured once, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_kv.benchmarks import claims_serving as claims
from sglang_kv.benchmarks import decode_shapes, figures, records


def row(name: str, context: int, page_size: int, step_ms: float) -> dict[str, Any]:
    arm = f"{name}, {context} tokens, pages of {page_size}"
    return {
        **{"arm": arm, "name": name, "context": context, "page_size": page_size, "batch": 4},
        **{"step_ms": step_ms, "decode_tok_s": 4000 / step_ms, "model": records.DEMO},
    }


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def write(*rows: dict[str, Any]) -> None:
        text = "".join(json.dumps(each) + "\n" for each in rows)
        (tmp_path / "decode_shapes.jsonl").write_text(text)

    monkeypatch.setattr(records, "FOLDER", tmp_path)
    return write


def test_no_point_is_measured_twice() -> None:
    """The page arms share `none` at their context with the sweep over contexts."""
    first = decode_shapes.points(16, (1000, 4000), 4000)
    assert list(first) == [
        *((arm, 4000) for arm in ("none", "snapkv by token", "snapkv by page")),
        *(("none", 1000), ("streamingllm", 1000), ("streamingllm", 4000)),
    ]
    second = decode_shapes.points(32, (1000, 4000), 4000)
    assert set(second) == {(arm, 4000) for arm in ("none", "snapkv by token", "snapkv by page")}
    assert second["snapkv by page", 4000]["granularity"] == "page"
    assert "granularity" not in second["snapkv by token", 4000]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--contexts", "1000,many"], "--contexts: must be whole numbers above 0, got '1000,many'"),
        (["--contexts", "0"], "--contexts: must be whole numbers above 0, got '0'"),
        (["--steps", "1"], "--steps: must be at least 2, got 1"),
        (["--batch", "0"], "--batch: must be at least 1, got 0"),
    ],
)
def test_bad_sizes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["decode_shapes", "--model", "none", *flags])
    with pytest.raises(SystemExit):
        decode_shapes.main()
    assert message in capsys.readouterr().err


def test_every_point_is_asked_of_a_server_with_its_page_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, ...]] = []
    asked: list[tuple[int, int, Any]] = []

    class FakeServer:
        def __init__(self, model: str, *flags: str) -> None:
            started.append(flags)

        def __enter__(self) -> FakeServer:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    def measure(server: FakeServer, batch: int, context: int, *rest: Any) -> dict[str, float]:
        # The real one draws prompts of so many tokens.
        asked.append((batch, len(range(context)), rest[1]["method"]))
        return {"step_ms": 1.0}

    monkeypatch.setattr(decode_shapes, "Server", FakeServer)
    monkeypatch.setattr(decode_shapes, "measure", measure)
    monkeypatch.setattr(decode_shapes, "run_batch", lambda *_: None)
    monkeypatch.setattr(decode_shapes, "read_bandwidth_gb_s", lambda: 10.0)
    out = tmp_path / "lines.jsonl"
    flags = ["--contexts", "1000,2000", "--cut", "500", "--batch", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["decode_shapes", "--model", "m", *flags])
    decode_shapes.main()
    cut = [(2, 500, method) for method in ("none", "snapkv", "snapkv")]
    sweep = [(2, n, method) for n in (1000, 2000) for method in ("none", "streamingllm")]
    assert asked == [*cut, *sweep, *cut]
    assert [flags[flags.index("--page-size") + 1] for flags in started] == ["16", "32"]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["context"], line["page_size"]) for line in lines] == [
        *((n, 16) for _, n, _ in cut + sweep),
        *((n, 32) for _, n, _ in cut),
    ]


@pytest.mark.parametrize(
    ("none", "window", "verdict"),
    [
        ((50, 70, 130), (50, 51, 53), "holds"),
        ((50, 70, 130), (50, 60, 80), "in part: linear, not flat"),
        ((60, 80, 81), (50, 50, 50), "in part: flat, not linear"),
        ((60, 59, 58), (50, 50, 50), "in part: flat, not linear"),
        ((60, 80, 81), (50, 60, 80), "does not hold"),
    ],
)
def test_linear_and_flat(
    record: Any, none: tuple[int, ...], window: tuple[int, ...], verdict: str
) -> None:
    contexts = (1000, 2000, 5000)
    rows = [row("none", n, 16, ms) for n, ms in zip(contexts, none, strict=True)]
    rows += [row("streamingllm", n, 16, ms) for n, ms in zip(contexts, window, strict=True)]
    record(*rows[:4])  # one context only of one arm
    assert claims.linear_and_flat() is None
    record(row("none", 5000, 16, 9999), *rows)  # the newest line of a point counts
    found = claims.linear_and_flat()
    assert found is not None
    assert found[0].startswith(
        f"none {', '.join(map(str, none))} ms; streamingllm {', '.join(map(str, window))} ms: "
    )
    assert found[1] == verdict
    drawn = figures.throughput_against_context()
    assert drawn is not None
    assert [(s.label, sorted(p[0] for p in s.points)) for s in drawn.series] == [
        ("none", [*contexts]),
        ("streamingllm", [*contexts]),
    ]


def test_two_contexts_show_no_line(record: Any) -> None:
    record(*(row(name, n, 16, 50.0) for name in ("none", "streamingllm") for n in (1000, 8000)))
    found = claims.linear_and_flat()
    assert found is not None
    assert found[1] == "open: two contexts show no line"


def test_pages(record: Any) -> None:
    names = ("none", "snapkv by token", "snapkv by page")
    record(*(row(name, 4000, 16, 60.0) for name in names))
    assert claims.page_sizes() is None  # one size only
    by_page = claims.whole_pages()
    assert by_page is not None
    assert by_page[1] == "no difference once copied, within 5%"
    sizes = {16: (70.0, 60.0, 55.0), 32: (71.0, 61.0, 56.0)}
    rows = [
        row(name, 4000, size, ms)
        for size, times in sizes.items()
        for name, ms in zip(names, times, strict=True)
    ]
    # The sweep over contexts adds `none` at others, in pages of 16; and so did an earlier cut.
    earlier = [row(name, 2000, 16, 10.0) for name in names]
    record(*earlier, *rows, row("none", 8000, 16, 140.0))
    found = claims.page_sizes()
    assert found is not None
    assert "at 4,000 tokens: none 70.0 and 71.0 ms; snapkv by token 60.0 and 61.0 ms" in found[0]
    by_page = claims.whole_pages()
    assert by_page is not None
    assert "a quarter of 4,000 tokens kept: a step takes 55.0 ms" in by_page[0]
    assert by_page[1] == "differs"
    # Without `none` at that context, another's is not taken for it.
    record(*rows[1:], row("none", 8000, 16, 140.0))
    assert claims.page_sizes() is None
