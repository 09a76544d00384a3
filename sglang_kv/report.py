"""The report of what was kept, on its way from the scheduler to the client.

Scheduler: `ReportingStreamer` adds the report to a request's last output, beside the host's own
"customized info". Tokenizer process: `report_to_meta_info` makes it `meta_info["kv_compression"]`,
which is all that `/generate` and `Engine` need. OpenAI routes: the answer gets
`sglext.kv_compression`; a stream gets it in a last chunk without choices, as the host sends its
own `sglext`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, create_model

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager

    from sglang_kv.request import RequestState

KEY = "kv_compression"
DONE = "data: [DONE]\n\n"

Report = dict[str, Any]


# Scheduler ---------------------------------------------------------------------------------------


def reporting_streamer(base: Any) -> type[SchedulerOutputStreamer]:
    """`base`, with the report in each request's last output."""

    class ReportingStreamer(base):
        __slots__ = ()

        has_additional_customized_info = True

        def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[Any]]:
            info: dict[str, list[Any]] = super().build_additional_customized_info(reqs)
            reports = [final_report(req) for req in reqs]
            if any(reports):
                info[KEY] = reports
            return info

    return ReportingStreamer


def final_report(req: Req) -> list[Report]:
    """One report when the request has ended, none before.

    A list, because that is what the host's own merge expects: a tokenizer process without this
    plugin (`--tokenizer-worker-num`) then shows a list of one instead of failing.
    """
    state: RequestState | None = getattr(req, "sglang_kv", None)
    if state is None or not req.finished():
        return []
    report = state.report()
    return [] if report is None else [report]


def report_from_streamer(
    streamer: type[SchedulerOutputStreamer], scheduler: Scheduler
) -> type[SchedulerOutputStreamer]:
    # The host refuses additional information where its Rust frontend takes the outputs.
    return streamer if scheduler.rust_server is not None else reporting_streamer(streamer)


# Tokenizer process -------------------------------------------------------------------------------


def report_to_meta_info(
    original: Callable[..., None],
    manager: TokenizerManager,
    meta_info: dict[str, Any],
    state: ReqState,
    customized_info: dict[str, list[Any]],
    index: int,
    finish_reason: dict[str, Any] | None,
) -> None:
    """Keep the report out of the host's merge.

    The host appends each value to a list per request, one entry per token, and cuts that list to
    the tokens of each chunk when streaming incrementally. The report is one value per request.
    """
    others = {key: values for key, values in customized_info.items() if key != KEY}
    original(manager, meta_info, state, others, index, finish_reason)
    if reports := customized_info.get(KEY, {index: None})[index]:
        meta_info[KEY] = reports[0]


class StreamReports:
    """The reports of one streamed OpenAI answer, noted while its outputs pass."""

    def __init__(self) -> None:
        self.by_choice: dict[int, Report | None] = {}
        self.complete = False

    async def watch(self, outputs: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[Any]:
        async with aclosing(outputs):
            async for output in outputs:
                self.by_choice[output.get("index", 0)] = output["meta_info"].get(KEY)
                yield output
        self.complete = True

    def value(self) -> Report | list[Report | None] | None:
        return one_or_list([self.by_choice[index] for index in sorted(self.by_choice)])


def one_or_list(reports: list[Report | None]) -> Report | list[Report | None] | None:
    if not any(reports):
        return None
    return reports[0] if len(reports) == 1 else reports


def watch_outputs(
    original: Callable[..., AsyncGenerator[dict[str, Any], None]],
    manager: TokenizerManager,
    obj: GenerateReqInput,
    request: Any = None,
) -> AsyncIterator[Any]:
    outputs = original(manager, obj, request)
    reports: StreamReports | None = getattr(obj, "sglang_kv_reports", None)
    return outputs if reports is None else reports.watch(outputs)


# OpenAI routes -----------------------------------------------------------------------------------


@functools.cache
def ext_class() -> type[BaseModel]:
    from sglang.srt.entrypoints.openai.protocol import SglExt

    field: Any = (Report | list[Report | None] | None, None)
    return create_model("SglExt", __base__=SglExt, kv_compression=field)


@functools.cache
def answer_class(host: type[BaseModel]) -> type[BaseModel]:
    """`host` with the report in its `sglext`.

    Pydantic writes the fields that the annotation names, so the answer needs a class of its own.
    The host's classes stay as they are.
    """
    sglext: Any = (ext_class() | None, None)
    return create_model(host.__name__, __base__=host, sglext=sglext)


def report_in_answer(
    answer: Any, serving: Any, request: Any, ret: list[dict[str, Any]], *rest: Any
) -> Any:
    reports = one_or_list([output["meta_info"].get(KEY) for output in ret])
    host: type[BaseModel] = type(answer)
    # An error comes back as a response of another class.
    if reports is None or "sglext" not in getattr(host, "model_fields", {}):
        return answer
    sglext = ext_class()(**dict(answer.sglext or {}), kv_compression=reports)
    # No validation: the host has made every other field.
    return answer_class(host).model_construct(
        answer.model_fields_set | {"sglext"}, **{**dict(answer), "sglext": sglext}
    )


async def report_in_stream(
    original: Callable[..., AsyncGenerator[str, None]],
    serving: Any,
    adapted_request: GenerateReqInput,
    request: Any,
    raw_request: Any,
) -> AsyncIterator[str]:
    """The host's stream, with the report before the usage chunk and the end.

    Chunks are read only once all outputs have passed, so tokens cost nothing here.
    """
    reports = StreamReports()
    # The host gives this very object to `generate_request`. It is no pydantic model and has no
    # slots; samples and batch items are other objects.
    adapted_request.sglang_kv_reports = reports
    latest = ""
    sent = False
    chunks = original(serving, adapted_request, request, raw_request)
    async with aclosing(chunks):
        async for chunk in chunks:
            if not sent and (reports.complete or chunk == DONE) and ends_choices(chunk):
                sent = True
                chunk, own = add_report(chunk, latest, reports.value())
                if own is not None:
                    yield own
            latest = chunk
            yield chunk


def ends_choices(chunk: str) -> bool:
    """Whether only response-level chunks follow: extensions, usage, the end."""
    payload = payload_of(chunk)
    return payload is None or payload.get("choices") == []


def payload_of(chunk: str) -> dict[str, Any] | None:
    return json.loads(chunk[6:]) if chunk.startswith("data: {") else None


def add_report(chunk: str, latest: str, value: Any) -> tuple[str, str | None]:
    """`chunk` and the chunk to send before it; the report goes into one of them."""
    payload, model = payload_of(chunk), payload_of(latest)
    # After an error there is no chunk to take the answer's id from, and no report to give.
    if value is None or model is None or "id" not in model:
        return chunk, None
    if payload is not None and payload.get("sglext"):
        payload["sglext"][KEY] = value
        return sse(payload), None
    return chunk, sse({**model, "choices": [], "usage": None, "sglext": {KEY: value}})


def sse(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n"


HOOKS: list[tuple[str, Callable[..., Any], str]] = [
    (
        "sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class",
        report_from_streamer,
        "AFTER",
    ),
    (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
        report_to_meta_info,
        "AROUND",
    ),
    (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        watch_outputs,
        "AROUND",
    ),
    (
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._build_chat_response",
        report_in_answer,
        "AFTER",
    ),
    (
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream",
        report_in_stream,
        "AROUND",
    ),
    (
        "sglang.srt.entrypoints.openai.serving_completions"
        ".OpenAIServingCompletion._build_completion_response",
        report_in_answer,
        "AFTER",
    ),
    (
        "sglang.srt.entrypoints.openai.serving_completions"
        ".OpenAIServingCompletion._generate_completion_stream",
        report_in_stream,
        "AROUND",
    ),
]
