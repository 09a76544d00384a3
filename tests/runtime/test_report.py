"""The report's way to the client, over the host's real classes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import (
    CachedTokensDetails,
    ChatCompletionResponse,
    CompletionResponse,
    ErrorResponse,
    SglExt,
    UsageInfo,
)
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.managers.tokenizer_manager import (
    TokenizerManager,
    _slice_streaming_output_meta_info,
)

from sglang_kv import report

REPORT: dict[str, Any] = {"method": "snapkv", "parameters": {"budget": 64}, "kept_tokens": 64}
OTHER: dict[str, Any] = {"method": "none", "parameters": {}, "kept_tokens": 900}


def request(*, finished: bool, of: dict[str, Any] | None = REPORT) -> Any:
    return SimpleNamespace(finished=lambda: finished, sglang_kv=SimpleNamespace(report=lambda: of))


# Scheduler ---------------------------------------------------------------------------------------


def new_streamer(base: type = SchedulerOutputStreamer) -> Any:
    names = (
        "send_to_detokenizer tree_cache server_args is_generation spec_algorithm "
        "disaggregation_mode enable_hicache_storage"
    )
    scheduler = SimpleNamespace(rust_server=None)
    streamer = report.report_from_streamer(base, scheduler)
    return streamer(**dict.fromkeys(names.split()))


def test_only_ended_requests_are_reported_in_order() -> None:
    reqs = [
        request(finished=False),
        request(finished=True),
        SimpleNamespace(finished=lambda: True),  # a health check: no state
        request(finished=True, of=None),  # aborted before it held anything
        request(finished=True, of=OTHER),
    ]
    info = new_streamer().build_additional_customized_info(reqs)
    assert info == {report.KEY: [[], [REPORT], [], [], [OTHER]]}


def test_steps_without_an_ended_request_send_nothing() -> None:
    assert new_streamer().build_additional_customized_info([request(finished=False)]) == {}
    assert new_streamer().build_additional_customized_info([]) == {}


def test_another_streamers_information_is_kept() -> None:
    class Other(SchedulerOutputStreamer):
        __slots__ = ()

        def build_additional_customized_info(self, reqs: list[Any]) -> dict[str, list[Any]]:
            return {"other": [[1]] * len(reqs)}

    info = new_streamer(Other).build_additional_customized_info([request(finished=True)])
    assert info == {"other": [[1]], report.KEY: [[REPORT]]}


def test_the_rust_frontend_keeps_the_hosts_streamer() -> None:
    scheduler = SimpleNamespace(rust_server=object())
    streamer = report.report_from_streamer(SchedulerOutputStreamer, scheduler)
    assert streamer is SchedulerOutputStreamer


# Tokenizer process -------------------------------------------------------------------------------


def merge(state: Any, info: dict[str, list[Any]], index: int = 0) -> dict[str, Any]:
    meta_info: dict[str, Any] = {"id": "r"}
    manager = object.__new__(TokenizerManager)
    original = TokenizerManager.update_request_meta_info
    report.report_to_meta_info(original, manager, meta_info, state, info, index, None)
    return meta_info


def merged_state() -> Any:
    return SimpleNamespace(customized_info_accumulated={}, customized_info_reported_keys=set())


def test_meta_info_carries_a_dict_that_the_host_neither_merges_nor_cuts() -> None:
    state = merged_state()
    assert merge(state, {report.KEY: [[]], "score": [[0.5]]}) == {"id": "r", "score": [0.5]}
    meta_info = merge(state, {report.KEY: [[REPORT]], "score": [[0.25]]})
    assert meta_info == {"id": "r", "score": [0.5, 0.25], report.KEY: REPORT}
    _slice_streaming_output_meta_info(meta_info, 1, state.customized_info_accumulated.keys())
    assert meta_info == {"id": "r", "score": [0.25], report.KEY: REPORT}


def test_each_request_of_a_batch_gets_its_own() -> None:
    info = {report.KEY: [[REPORT], [], [OTHER]]}
    found = [merge(merged_state(), info, index).get(report.KEY) for index in range(3)]
    assert found == [REPORT, None, OTHER]


def test_a_tokenizer_without_the_plugin_shows_a_list_of_one() -> None:
    meta_info: dict[str, Any] = {}
    manager = object.__new__(TokenizerManager)
    manager.update_request_meta_info(meta_info, merged_state(), {report.KEY: [[REPORT]]}, 0, None)
    assert meta_info == {report.KEY: [REPORT]}


# OpenAI answers ----------------------------------------------------------------------------------


def answer_of(cls: type, **changes: Any) -> Any:
    usage = UsageInfo(prompt_tokens=1, completion_tokens=1, total_tokens=2)
    return cls(id="r", model="m", created=7, choices=[], usage=usage, **changes)


def outputs_of(*reports: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [{"meta_info": {} if r is None else {report.KEY: r}} for r in reports]


@pytest.mark.parametrize("cls", [ChatCompletionResponse, CompletionResponse])
@pytest.mark.parametrize(
    ("reports", "expected"),
    [((REPORT,), REPORT), ((REPORT, OTHER), [REPORT, OTHER]), ((None, OTHER), [None, OTHER])],
)
def test_answers_carry_the_report(cls: type, reports: Any, expected: Any) -> None:
    before = answer_of(cls)
    after: Any = report.report_in_answer(before, None, None, outputs_of(*reports), 7)
    assert issubclass(type(after), cls)
    written = json.loads(after.model_dump_json(by_alias=True))
    assert written.pop("sglext") == {"kv_compression": expected}
    assert written == json.loads(before.model_dump_json(by_alias=True))


def test_the_hosts_extensions_stay_beside_the_report() -> None:
    host = SglExt(input_ids=[1, 2], cached_tokens_details=CachedTokensDetails(device=3, host=0))
    before = answer_of(ChatCompletionResponse, sglext=host)
    after = report.report_in_answer(before, None, None, outputs_of(REPORT), 7)
    expected = {**json.loads(host.model_dump_json()), "kv_compression": REPORT}
    assert json.loads(after.model_dump_json())["sglext"] == expected
    assert "kv_compression" not in SglExt.model_fields


def test_answers_without_a_report_and_errors_stay_the_same_object() -> None:
    plain = answer_of(CompletionResponse)
    assert report.report_in_answer(plain, None, None, outputs_of(None), 7) is plain
    error = ErrorResponse(message="no", type="t", code=500)
    assert report.report_in_answer(error, None, None, outputs_of(REPORT), 7) is error


# OpenAI streams ----------------------------------------------------------------------------------


def chunk_of(**fields: Any) -> str:
    payload = {"id": "r", "object": "chunk", "created": 7, "model": "m", **fields}
    return f"data: {json.dumps(payload)}\n\n"


TOKEN = chunk_of(choices=[{"index": 0, "delta": {"content": "a"}}], usage=None)
FINISH = chunk_of(choices=[{"index": 0, "finish_reason": "stop"}])
USAGE = chunk_of(choices=[], usage={"total_tokens": 2})
EXTENSION = chunk_of(choices=[], sglext={"input_ids": [1]})
ERROR = 'data: {"error": {"message": "no"}}\n\n'


async def collect(chunks: AsyncIterator[str]) -> list[str]:
    return [chunk async for chunk in chunks]


def stream(
    tail: list[str],
    outputs: list[dict[str, Any]],
    on_output: Callable[[dict[str, Any]], None] = lambda _: None,
) -> list[str]:
    """One streamed answer: a token chunk for each output, then the tail."""

    async def generate(manager: Any, obj: Any, raw: Any = None) -> AsyncIterator[dict[str, Any]]:
        for output in outputs:
            yield output

    async def host(serving: Any, obj: Any, request: Any, raw: Any) -> AsyncIterator[str]:
        async for output in report.watch_outputs(generate, None, obj, raw):  # type: ignore[arg-type]
            on_output(output)
            yield TOKEN
        for chunk in tail:
            yield chunk

    obj = GenerateReqInput(text="a")
    chunks = report.report_in_stream(host, None, obj, None, None)  # type: ignore[arg-type]
    return asyncio.run(collect(chunks))


def expected_chunk(value: Any, model: str = FINISH) -> dict[str, Any]:
    fields: dict[str, Any] = {"choices": [], "usage": None, "sglext": {"kv_compression": value}}
    return {**json.loads(model[6:]), **fields}


def output(of: dict[str, Any] | None, index: int | None = None) -> dict[str, Any]:
    return {**outputs_of(of)[0], **({} if index is None else {"index": index})}


@pytest.mark.parametrize("end", [[report.DONE], [USAGE, report.DONE]])
def test_streams_carry_it_after_the_choices(end: list[str]) -> None:
    chunks = stream([FINISH, *end], [output(None), output(REPORT)])
    own = chunks.pop(-1 - len(end))
    assert chunks == [TOKEN, TOKEN, FINISH, *end]
    assert json.loads(own[6:]) == expected_chunk(REPORT)


def test_a_stream_that_ends_with_its_last_token() -> None:
    """/v1/completions sends no chunk of its own for the finish reason."""
    own = stream([report.DONE], [output(REPORT)])[-2]
    assert json.loads(own[6:]) == expected_chunk(REPORT, TOKEN)


def test_samples_are_listed_by_index() -> None:
    outputs = [output(None, 1), output(None, 0), output(OTHER, 1), output(REPORT, 0)]
    own = stream([FINISH, report.DONE], outputs)[-2]
    assert json.loads(own[6:])["sglext"] == {"kv_compression": [REPORT, OTHER]}


def test_the_hosts_own_extension_chunk_takes_it() -> None:
    chunks = stream([FINISH, EXTENSION, USAGE, report.DONE], [output(REPORT)])
    sglext = json.loads(chunks[2][6:])["sglext"]
    assert sglext == {"input_ids": [1], "kv_compression": REPORT}
    assert [chunks[0], chunks[1], *chunks[3:]] == [TOKEN, FINISH, USAGE, report.DONE]


def test_named_events_come_after_it() -> None:
    event = "event: sglext_ids\n" + EXTENSION
    chunks = stream([FINISH, event, report.DONE], [output(REPORT)])
    assert json.loads(chunks[2][6:])["sglext"] == {"kv_compression": REPORT}
    assert chunks[3:] == [event, report.DONE]


@pytest.mark.parametrize("tail", [[FINISH, USAGE, report.DONE], [ERROR, report.DONE]])
def test_without_a_report_the_stream_is_the_hosts(tail: list[str]) -> None:
    assert stream(tail, [output(None)]) == [TOKEN, *tail]


def test_an_error_at_the_end_gets_no_report() -> None:
    assert stream([ERROR, report.DONE], [output(REPORT)]) == [TOKEN, ERROR, report.DONE]


def test_errors_pass() -> None:
    def fail(_: dict[str, Any]) -> None:
        raise ValueError("too long")

    with pytest.raises(ValueError, match="too long"):
        stream([report.DONE], [output(REPORT)], fail)


def test_closing_the_answer_closes_the_generation() -> None:
    closed = []

    async def generate(manager: Any, obj: Any, raw: Any = None) -> AsyncIterator[dict[str, Any]]:
        try:
            while True:
                yield output(None)
        finally:
            closed.append("generation")

    async def host(serving: Any, obj: Any, request: Any, raw: Any) -> AsyncIterator[str]:
        outputs = report.watch_outputs(generate, None, obj, raw)  # type: ignore[arg-type]
        try:
            async for _ in outputs:
                yield TOKEN
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    async def disconnect() -> None:
        obj = GenerateReqInput(text="a")
        chunks = report.report_in_stream(host, None, obj, None, None)  # type: ignore[arg-type]
        await anext(chunks)
        await chunks.aclose()  # type: ignore[attr-defined]

    asyncio.run(disconnect())
    assert closed == ["generation"]


def test_other_requests_are_not_watched() -> None:
    outputs = object()
    watched = report.watch_outputs(lambda *_: outputs, None, GenerateReqInput(text="a"))  # type: ignore[arg-type]
    assert watched is outputs
