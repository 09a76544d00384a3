"""The quality suites without a server: prompts, scores, intervals, pairing, resuming."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from sglang_kv.benchmarks import fidelity, needle, perplexity, quality, suites, tables
from sglang_kv.benchmarks.arms import FULL, Arm, Asker, memory
from sglang_kv.benchmarks.common import environment, wilson
from sglang_kv.benchmarks.prompts import Chat, Haystack, build, load_text, paragraphs
from sglang_kv.benchmarks.proof import NotProved, parameters_of

LENGTHS, DEPTHS = (256, 700), (0.0, 0.5, 1.0)
DENSE = Arm(FULL, {"method": FULL})
WINDOW = Arm("window", {"method": "streamingllm", "sinks": 4, "recent": 60})


@pytest.fixture(scope="module")
def chat(demo_model: Path) -> Chat:
    return Chat.load(str(demo_model))


@pytest.fixture(scope="module")
def haystack(chat: Chat) -> Haystack:
    return Haystack(chat, load_text())


@pytest.fixture(scope="module")
def cases(chat: Chat, haystack: Haystack) -> list[needle.Case]:
    return needle.make_cases(chat, haystack, LENGTHS, DEPTHS, 2, 7)


class FakeServer:
    """Answers from a function of the body; counts what it is asked."""

    def __init__(self, answer: Any):
        self.answer, self.bodies = answer, []  # type: ignore[var-annotated]

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 0) -> Any:
        assert path == "/generate"
        self.bodies.append(body)
        policy = body["sampling_params"]["custom_params"]["kv_compression"]
        report = {"method": policy["method"], "parameters": parameters_of(policy)}
        report |= {"kept_bytes": 1, "freed_bytes": 3}
        raw = self.answer(body)
        raw.setdefault("meta_info", {})["kv_compression"] = report
        return raw


def asker(answer: Any, folder: Path, commit: str = "abc") -> tuple[Asker, FakeServer]:
    server = FakeServer(answer)
    return Asker(server, folder, {"commit": commit}), server  # type: ignore[arg-type]


# Prompts


def test_sentences_end_where_a_reader_ends_them() -> None:
    text = 'I met Mr. Holmes. "Sit down!" he said.\n\n"Why?" It cost 4.50 pounds. J. Clay left.'
    assert paragraphs(text) == [
        ["I met Mr. Holmes.", '"Sit down!" he said.'],
        ['"Why?"', "It cost 4.50 pounds.", "J. Clay left."],
    ]


def test_lengths_are_exact(cases: list[needle.Case]) -> None:
    assert len(cases) == 2 * len(LENGTHS) * len(DEPTHS) * len(needle.KINDS)
    assert len({case.id for case in cases}) == len(cases)
    assert all(len(case.prompt_ids) == case.length for case in cases)


def test_the_fold_is_where_the_question_begins(chat: Chat, cases: list[needle.Case]) -> None:
    for case in cases:
        before, after = case.prompt_ids[: case.fold_at], case.prompt_ids[case.fold_at :]
        assert chat.decode(after, special=True).startswith("What is the special magic ")
        assert "What is the special magic" not in chat.decode(before)
        assert chat.decode(before).endswith("\n\n")
        assert case.value in chat.decode(before)
        assert case.value not in chat.decode(after)


def test_the_needle_is_at_its_depth_after_a_sentence(chat: Chat, haystack: Haystack) -> None:
    fact = "The special magic number for walnut is: 1234567."
    size = len(chat.encode(" " + fact))
    for depth in (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0):
        prompt = build(
            chat,
            haystack,
            random.Random(depth),
            2000,
            "What?",
            intro="Read.",
            needle=fact,
            depth=depth,
        )
        at = prompt.needle_at
        assert chat.decode(prompt.ids[at : at + size]) == " " + fact
        start = len(chat.head) + len(chat.encode("Read.\n\n"))
        share = (at - start) / (prompt.question_at - start - size)
        assert abs(share - depth) < 0.03
        assert chat.decode(prompt.ids[:at]).rstrip()[-1] in ".!?\"')"


def test_samples_differ_and_the_seed_decides(chat: Chat, haystack: Haystack) -> None:
    def ids(seed: int) -> list[tuple[int, ...]]:
        made = needle.make_cases(chat, haystack, [300], [0.5], 3, seed, kinds=["number"])
        return [tuple(case.prompt_ids) for case in made]

    assert ids(1) == ids(1)
    assert len({*ids(1), *ids(2)}) == 6


def test_a_long_needle_is_wider_than_the_pooling(chat: Chat) -> None:
    text = needle.LONG_NEEDLE.format(noun="number", key="walnut", value="1234567")
    between = text[text.index("walnut") : text.index("1234567")]
    assert len(chat.encode(between)) > 31
    assert len(paragraphs(text)[0]) == 2


def test_keys_and_words_are_apart_and_not_in_the_text(haystack: Haystack) -> None:
    assert not set(needle.KEYS) & set(needle.WORDS)
    for words in (needle.KEYS, needle.WORDS):
        assert len(words) == len(set(words))
        assert sum(word not in haystack.text for word in words) > 40


def test_too_short_a_prompt_says_so(chat: Chat, haystack: Haystack) -> None:
    with pytest.raises(ValueError, match="leaves no room"):
        needle.make_cases(chat, haystack, [80], [0.5], 1, 0)


# Scores


@pytest.mark.parametrize(
    ("hits", "n", "expected"),
    [
        (8, 10, [0.4902, 0.9433]),
        (0, 10, [0.0, 0.2775]),
        (10, 10, [0.7225, 1.0]),
        (147, 150, [0.9429, 0.9932]),
        (0, 0, None),
    ],
)
def test_wilson(hits: int, n: int, expected: list[float] | None) -> None:
    assert wilson(hits, n) == pytest.approx(expected, abs=1e-4)


def test_a_hit_is_the_value_in_the_answer() -> None:
    assert needle.hit(["1234567"], "It is 1234567.")
    assert needle.hit(["amber"], "It is Amber.")
    assert not needle.hit(["1234567"], "It is 123456.")
    assert not needle.hit(["1234567", "7654321"], "It is 1234567.")


def test_pairing(cases: list[needle.Case]) -> None:
    one, two, three, four = cases[0], cases[1], cases[2], cases[3]
    full = [needle.Answer(c.id, "aware", h) for c, h in ((one, 1), (two, 1), (three, 0), (four, 1))]  # type: ignore[arg-type]
    arm = [
        needle.Answer(case.id, column, case is not one, 0.25)
        for case in (one, two, three, four)
        for column in needle.COLUMNS
    ]
    row = needle.summarize(cases, arm, full)
    assert row["memory"] == 0.25
    aware = [cell for cell in row["summary"] if cell["column"] == "aware"]
    assert sum(cell["n"] for cell in aware) == 4
    assert sum(cell["hits"] for cell in aware) == 3
    assert sum(cell["full_hits"] for cell in aware) == 3
    assert sum(cell["kept"] for cell in aware) == 2
    (word,) = [cell for cell in aware if cell["kind"] == two.kind]
    assert word["kept_interval"] == wilson(word["kept"], word["full_hits"])
    assert {cell["depth"] for cell in row["cells"]} == {one.depth, four.depth}


def test_divergence() -> None:
    half = [math.log(0.5), math.log(0.5)]
    assert fidelity.divergence(half, half) == pytest.approx(0, abs=1e-6)
    dense, arm = [math.log(0.5), math.log(0.3)], [math.log(0.25), math.log(0.25)]
    expected = 0.5 * math.log(2) + 0.3 * math.log(1.2) + 0.2 * math.log(0.2 / 0.5)
    assert fidelity.divergence(dense, arm) == pytest.approx(expected)
    # An arm that puts nothing on what the full cache says is far, but not infinitely.
    assert 10 < fidelity.divergence([0.0], [-1e9]) < 100


def test_perplexity_is_paired_by_position() -> None:
    case = perplexity.Case("8-0", list(range(8)))
    full = [{"case": "8-0", "start": 0, "logprobs": [-1.0] * 7, "memory": 1.0}]
    # Folded at 3: logprobs of positions 4 to 7.
    arm = [{"case": "8-0", "start": 3, "logprobs": [-1.0, -2.0, -2.0, -2.0], "memory": 0.5}]
    row = perplexity.summarize([case], arm, full, bucket=4)
    (cell,) = row["cells"]
    assert (cell["from"], cell["to"], cell["n"]) == (4, 8, 4)
    assert row["summary"][0]["ppl"] == pytest.approx(math.exp(1.75), abs=1e-3)
    assert row["summary"][0]["ratio"] == pytest.approx(math.exp(0.75), abs=1e-4)
    low, high = row["summary"][0]["ratio_interval"]
    assert low < math.exp(0.75) < high
    dense = perplexity.summarize([case], full, full, bucket=4)
    assert [c["from"] for c in dense["cells"]] == [0, 4]
    assert dense["summary"][0]["ratio_interval"] == [1.0, 1.0]


# Arms and requests


def test_columns_and_folds() -> None:
    assert [DENSE.has(column) for column in needle.COLUMNS] == [True, False]
    assert [WINDOW.has(column) for column in needle.COLUMNS] == [True, True]
    fixed = Arm("fixed", {**WINDOW.policy, "fold_at": 5})
    assert not fixed.has("agnostic")
    assert WINDOW.at(9) == {**WINDOW.policy, "fold_at": 9}
    assert WINDOW.with_known_tokens(9) == WINDOW.policy
    once = Arm("once", {"method": "snapkv", "keep_ratio": 0.25})
    assert once.with_known_tokens(9) == {**once.policy, "fold_at": 9}


@pytest.mark.parametrize("text", ["x", "x={", 'x={"method": "no-such"}', 'x={"recent": 3}', "x=3"])
def test_a_bad_arm_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - JSON's, ours, or the registry's
        Arm.parse(text)


def test_needles_reach_the_server_and_are_scored(
    chat: Chat, cases: list[needle.Case], tmp_path: Path
) -> None:
    few = cases[:3]
    by_prompt = {tuple(case.prompt_ids): case for case in few}

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        case = by_prompt[tuple(body["input_ids"])]
        policy = body["sampling_params"]["custom_params"]["kv_compression"]
        said = "no idea" if policy.get("fold_at") else f"It is {case.value}."
        return {"output_ids": chat.encode(said)}

    ask, server = asker(answer, tmp_path)
    answers = needle.run(ask, chat, few, [DENSE, WINDOW])
    # All arms of a prompt in turn, the full cache first.
    assert len(server.bodies) == 9
    assert [body["input_ids"] == few[0].prompt_ids for body in server.bodies[:4]] == [True] * 3 + [
        False
    ]
    policies = [b["sampling_params"]["custom_params"]["kv_compression"] for b in server.bodies[:3]]
    assert policies == [DENSE.policy, WINDOW.policy, WINDOW.at(few[0].fold_at)]
    assert [answer.hit for answer in answers["window"]] == [True, False] * 3
    assert {answer.memory for answer in answers["window"]} == {0.25}

    lines = [{"id": case.id, "output_ids": chat.encode(case.value)} for case in few]
    assert all(answer.hit for answer in needle.score_answers(chat, few, lines))
    with pytest.raises(ValueError, match="not a case"):
        needle.score_answers(chat, few, [{"id": "other", "output_ids": []}])


def test_fidelity_forces_the_full_answer(tmp_path: Path) -> None:
    said = [11, 12, 13]
    top = [[[math.log(0.6), token, None], [math.log(0.3), 99, None]] for token in said]

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        policy = body["sampling_params"]["custom_params"]["kv_compression"]
        if "top_logprobs_num" not in body:
            return {"output_ids": [11, 99, 13]}
        if "token_ids_logprob" not in body:
            return {"output_ids": said, "meta_info": {"output_top_logprobs": top}}
        assert body["input_ids"] == [1, 2, 3, 4, *said]
        assert body["logprob_start_len"] == 3
        assert body["token_ids_logprob"] == [11, 12, 13, 99]
        best = said if policy["method"] == FULL else [11, 99, 13]
        given = [
            [[math.log(0.6 if t == s else 0.3), t, None] for t in (11, 12, 13, 99)] for s in said
        ]
        meta = {"input_top_logprobs": [None, *([[0.0, b, None]] for b in best)]}
        return {
            "output_ids": [0],
            "meta_info": {**meta, "input_token_ids_logprobs": [None, *given]},
        }

    ask, server = asker(answer, tmp_path)
    case = fidelity.Case("one", [1, 2, 3, 4], 2, 4)
    once = Arm("once", {"method": "snapkv"})
    scores = fidelity.run(ask, [case], [DENSE, WINDOW, once], tokens=3)
    (dense,), window = scores[FULL], scores["window"]
    assert (dense.agreed, dense.divergence, dense.tokens) == (3, 3, 3)
    assert dense.kl == pytest.approx(0)
    assert [score.column for score in window] == ["aware", "agnostic"]
    assert (window[0].agreed, window[0].divergence) == (2, 1)
    forced = [b for b in server.bodies if "token_ids_logprob" in b]
    folds = [b["sampling_params"]["custom_params"]["kv_compression"].get("fold_at") for b in forced]
    assert folds[:3] == [None, None, 2]
    assert folds[3] == 4
    (cell,) = fidelity.summarize([dense])["cells"]
    assert cell["same_answers"] == cell["n"] == 1


def test_an_answer_of_another_policy_is_an_error() -> None:
    policy = {"method": "snapkv", "keep_ratio": 0.25, "fold_at": 7}
    body = {"sampling_params": {"custom_params": {"kv_compression": policy}}}
    counted = {"kept_bytes": 1, "freed_bytes": 3}
    served = {"method": "snapkv", "parameters": parameters_of(policy), **counted}
    assert memory({"meta_info": {"kv_compression": served}}, body) == 0.25
    none = {"method": "none", "parameters": {}, **counted}
    with pytest.raises(SystemExit, match=r"asked for snapkv .* applied was \('none', {}\)"):
        memory({"meta_info": {"kv_compression": none}}, body)
    with pytest.raises(SystemExit, match="applied was None"):
        memory({"meta_info": {}}, body)
    for name, value in (("keep_ratio", 0.5), ("fold_at", 8), ("window", 16)):
        other = served | {"parameters": served["parameters"] | {name: value}}
        with pytest.raises(SystemExit, match="asked for snapkv"):
            memory({"meta_info": {"kv_compression": other}}, body)
    overridden = other | {"overridden": True}
    with pytest.raises(SystemExit, match="--kv-compression-override server"):
        memory({"meta_info": {"kv_compression": overridden}}, body)


def test_a_suite_proves_each_arm(tmp_path: Path) -> None:
    """Wherever its prompts fold, and whether they are answered now or were before."""
    once = {"method": "snapkv", "keep_ratio": 0.25}

    def body(policy: dict[str, Any], n: int) -> dict[str, Any]:
        return {"n": n, "sampling_params": {"custom_params": {"kv_compression": policy}}}

    for asked in (3, 0):
        ask, server = asker(lambda body: {"output_ids": [body["n"]]}, tmp_path)
        ask.start("needle", 3)
        for n, policy in enumerate((once, {**once, "fold_at": 5}, WINDOW.policy)):
            ask("a", body(policy, n), lambda raw: {})
        assert len(server.bodies) == asked
        proof = ask.proof({**once, "window": 32})  # the default
        assert (proof["method"], proof["answers"]) == ("snapkv", 2)
        assert proof["parameters"]["keep_ratio"] == 0.25
        assert "fold_at" not in proof["parameters"]
        with pytest.raises(NotProved, match="no answer is of"):
            ask.proof({**once, "window": 16})
    ask.start("ruler", 0)
    with pytest.raises(NotProved, match="no answer is of"):
        ask.proof(once)


def test_a_resumed_run_asks_only_what_is_missing(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        return {"output_ids": [body["n"]]}

    def body(n: int) -> dict[str, Any]:
        return {"n": n, "sampling_params": {"custom_params": {"kv_compression": WINDOW.policy}}}

    ask, server = asker(answer, tmp_path)
    for n in (1, 2):
        assert ask("a", body(n), lambda raw: {"more": 1})["output_ids"] == [n]
    assert len(server.bodies) == 2
    # A kill in the middle of a line: that answer is asked for again, and nothing is lost.
    path = tmp_path / "answers.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    ask, server = asker(answer, tmp_path)
    for n in (1, 2, 3):
        assert ask("a", body(n), lambda raw: {})["output_ids"] == [n]
    assert [b["n"] for b in server.bodies] == [2, 3]
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 3
    # Other code, other answers.
    ask, server = asker(answer, tmp_path, commit="def")
    ask("a", body(1), lambda raw: {})
    assert len(server.bodies) == 1


def test_a_run_from_end_to_end_and_again(
    chat: Chat,
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All suites against a server whose model gives every token the same chance."""
    entry = [math.log(1 / 50000), 7, None]

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        start = body.get("logprob_start_len", len(body["input_ids"]))
        rest = len(body["input_ids"]) - start - 1
        asked = [[entry[0], token, None] for token in body.get("token_ids_logprob", [])]
        meta = {
            "output_top_logprobs": [[entry]] * 3,
            "input_token_logprobs": [[None, 7, None], *([entry] * rest)],
            "input_top_logprobs": [None, *([[entry]] * rest)],
            "input_token_ids_logprobs": [None, *([asked] * rest)],
        }
        return {"output_ids": [7, 7, 7], "meta_info": meta}

    class Whole(FakeServer):
        pages = "auto"

        def __enter__(self) -> Whole:
            return self

        def __exit__(self, *_exc: object) -> None:
            pass

        def get(self, path: str) -> str:
            assert path == "/server_info"
            about = {"model_path": str(demo_model), "tokenizer_path": None, "dtype": "bfloat16"}
            return json.dumps(about | {"kv_cache_dtype": self.pages})

    server = Whole(answer)
    monkeypatch.setattr(quality, "start_server", lambda args: server)
    # The tree may change between the two runs, and with it whether its commit is "dirty".
    where = environment()
    monkeypatch.setattr(quality, "environment", lambda: where)
    results = tmp_path / "results.jsonl"
    flags = ["--base-url", "http://nowhere", "--lengths", "256,300", "--depths", "0.5"]
    flags += ["--samples", "1", "--work", str(tmp_path), "--results", str(results)]
    flags += ["--arm", f"window={json.dumps(WINDOW.policy)}"]
    quality.main(flags)
    # Two lengths: 3 kinds x 3 columns; the answer and its forcing, 3 columns; 2 arms.
    assert len(server.bodies) == 2 * (3 * 3 + 2 * 3 + 2)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["suite"], row["arm"]) for row in rows] == [
        (suite, arm) for suite in suites.USUAL for arm in (FULL, "window")
    ]
    assert all(row["seed"] == 0 and row["environment"]["commit"] for row in rows)
    # Of two lengths: needles of 3 kinds in each column; an answer and its forcing; one stretch.
    assert [row["proved"]["answers"] for row in rows] == [6, 12, 4, 8, 2, 2]
    assert {row["proved"]["parameters"].get("recent") for row in rows} == {None, 60}
    assert rows[-1]["summary"][0]["ppl"] == pytest.approx(50000, rel=1e-3)
    first = capsys.readouterr().out

    quality.main(flags)
    assert len(server.bodies) == 2 * (3 * 3 + 2 * 3 + 2)
    assert capsys.readouterr().out == first
    quality.main(["--report", "--results", str(results)])
    assert capsys.readouterr().out == first

    # Pages of 8 bits: other answers, in rows that are set beside no others.
    server.pages, asked = "fp8_e4m3", len(server.bodies)
    quality.main([*flags, "--suite", "perplexity"])
    assert len(server.bodies) == asked + 2 * 2
    settings = [json.loads(line)["settings"] for line in results.read_text().splitlines()]
    assert [s.get("kv_cache_dtype") for s in settings[-2:]] == ["fp8_e4m3"] * 2
    assert not any("kv_cache_dtype" in s for s in settings[:-2])


# Tables


def test_the_full_cache_stands_first_and_the_newest_row_counts(
    cases: list[needle.Case], tmp_path: Path
) -> None:
    def row(arm: Arm, hits: bool) -> dict[str, Any]:
        answers = [needle.Answer(case.id, "aware", hits, 1.0) for case in cases]
        return {
            "suite": "needle",
            "arm": arm.name,
            "policy": arm.policy,
            "model": "m",
            "seed": 7,
            "settings": {},
            "environment": environment(),
            **needle.summarize(cases, answers, answers),
        }

    rows = [row(WINDOW, False), row(WINDOW, True), row(DENSE, True)]
    text = tables.table(rows)
    found = [line for line in text.splitlines() if "| number |" in line]
    assert found[0].startswith("| none | 1.00 | - | number | 12/12 |")
    assert found[1].startswith("| window | 1.00 | seen | number | 12/12 |")
    assert "0/12" not in text
    pytest.importorskip("matplotlib")
    pictures = tables.heat_maps(rows, tmp_path)
    assert [path.name for path in pictures] == ["needle-m-window.png", "needle-m-none.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
