"""What the scheduler refuses when a request comes in: there the prompt's length, the model's shape
and its gates are known, as the HTTP process does not know them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from ledger_harness import LAYERS, Harness

from sglang_kv import runtime
from sglang_kv.config import Options
from sglang_kv.hooks import _create_generation_req
from sglang_kv.namespaces import Sharing
from sglang_kv.request import RequestState

PYRAMID: dict[str, Any] = {"method": "pyramidkv", "budget": 30, "window": 10}
SNAPKV: dict[str, Any] = {"method": "snapkv", "budget": 30, "window": 10}
STREAMING: dict[str, Any] = {"method": "streamingllm", "sinks": 2, "recent": 28}


@pytest.fixture(autouse=True)
def _no_runtime() -> Iterator[None]:
    before = runtime.current()
    yield
    runtime.install(before)


def arrive(
    options: Options, spec: Any = None, prompt: int = 200, **custom: Any
) -> tuple[RequestState, str | None]:
    """A request comes in; its state, and why it was refused."""
    ledger = Harness(pool_tokens=1024).ledger
    runtime.install(runtime.Runtime(options, ledger, Sharing(), 0.0))
    said: list[str] = []
    req = SimpleNamespace(origin_input_ids=[0] * prompt, set_finish_with_abort=said.append)
    params = {**({} if spec is None else {"kv_compression": spec}), **custom}
    received = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=params))
    _create_generation_req(req, None, received)
    assert len(said) < 2
    state: RequestState = req.sglang_kv  # type: ignore[attr-defined]
    return state, said[0] if said else None


def test_a_layer_that_keeps_too_little() -> None:
    options = Options(method="none", min_keep=20)
    state, said = arrive(options, PYRAMID)
    assert said == (
        f"kv_compression.budget: 'pyramidkv' leaves head 0 of layer {LAYERS - 1} with 11 tokens, "
        "below this server's --kv-compression-min-keep 20"
    )
    assert state.policy.name == "none"  # what is refused holds nothing back
    for good, prompt in ((SNAPKV, 200), (PYRAMID, 30)):
        state, said = arrive(options, good, prompt)
        assert said is None
        assert state.policy.name == good["method"]
    # The server's own, too, where a client names none or is not asked.
    default = Options(
        method="pyramidkv",
        config={"budget": 30, "window": 10},
        min_keep=20,
        override="server",
    )
    for spec in (None, SNAPKV):
        assert "--kv-compression-min-keep 20" in str(arrive(default, spec)[1])


@pytest.mark.parametrize("wanted", ["evict", "retract", None])
def test_pressure_that_would_do_nothing(wanted: str | None) -> None:
    options = Options(method="none", pressure="evict")
    custom = {} if wanted is None else {"kv_pressure": wanted}
    state, said = arrive(options, SNAPKV, **custom)
    assert said is None
    assert state.evictable == (wanted != "retract")
    for spec in (STREAMING, {"method": "duoattention", "recent": 20}):
        state, said = arrive(options, spec, **custom)
        if wanted == "evict":
            assert said is not None
            assert said.startswith("kv_pressure: evict takes nothing from requests with a window")
        else:
            assert said is None
    # Who is given another policy than he asked for asked for no contradiction.
    override = Options(method="streamingllm", pressure="evict", override="server")
    state, said = arrive(override, SNAPKV, **custom)
    assert said is None
    assert state.overridden
