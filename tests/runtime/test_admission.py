"""Who may enter, and what can be promised: intake checks and SGLang's own adder under the gate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from ledger_harness import Harness, Req
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_policy import PrefillAdder

from sglang_kv.admission import check_request, gated_adder
from sglang_kv.compression import parse_policy
from sglang_kv.request import RequestState


class AdderReq(Req):
    """What SGLang's adder asks of a request besides."""

    retracted_stain = False
    host_hit_length = swa_host_hit_length = host_loaded_length = 0

    @property
    def extend_len(self) -> int:
        return self.extend_end - self.prefix_len

    def fulfilled_storage_hit_len(self, _n: int) -> int:
        return 0

    def needs_host_load_back(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


@pytest.fixture
def adder(monkeypatch: pytest.MonkeyPatch) -> Any:
    exec_config = SimpleNamespace(features=SimpleNamespace(enable_encoder_swa_bounded_replay=False))
    monkeypatch.setattr(schedule_policy, "_use_exact_chunk_fill", lambda: False)
    monkeypatch.setattr(
        schedule_policy, "get_schedule", lambda: SimpleNamespace(schedule_policy="fcfs")
    )
    monkeypatch.setattr(schedule_policy, "mamba_prefill_chunk_grid", lambda: 1)
    monkeypatch.setattr(schedule_policy, "get_exec", lambda: exec_config)

    def make(h: Harness) -> Any:
        gated = gated_adder(PrefillAdder, h.ledger)
        return gated(h.page_size, h.tree, h.allocator, None, 0.5, 16384, h.ledger.chunk_tokens)

    return make


def request(h: Harness, prompt: int, policy: dict[str, Any], new_tokens: int = 64) -> AdderReq:
    req = AdderReq(list(range(prompt)), parse_policy(policy))
    req.sampling_params.max_new_tokens, req.sampling_params.min_new_tokens = new_tokens, 0
    h.admit(req)
    return req


@pytest.mark.parametrize("chunk", [None, 128])
@pytest.mark.parametrize("disable_tree", [False, True])
def test_computed_again_it_stops_at_its_fold(
    adder: Any, chunk: int | None, disable_tree: bool
) -> None:
    """Also without chunked prefill, and by SGLang's shortcut for `ignore_eos` without a tree."""
    h = Harness(page_size=16, pool_tokens=2048, virtual_tokens=8192, disable_tree=disable_tree)
    h.ledger.chunk_tokens = chunk
    req = request(h, 100, {"method": "snapkv", "budget": 64, "window": 8})
    req.sampling_params.ignore_eos = True
    assert check_request(h.ledger, req) is None
    req.output_ids.extend([1, 2, 3, 4, 5])  # it was retracted after five tokens
    ends = []
    first = adder(h)
    first.add_one_req(req, False, None)
    assert req.sampling_params.ignore_eos
    for _ in range(2):
        ends.append(req.extend_end)
        h._alloc(req, req.extend_end)  # noqa: SLF001
        h.ledger.after_prefill([req])
        h.checkpoint(req)
        if req.extend_end < 105:
            adder(h).add_chunked_req(req)
    assert ends == [100, 105]
    assert int(h.ledger.streams.desc[req.sglang_kv.slot, 0, 0, 0]) == 64 + 5


@pytest.mark.parametrize(
    ("policy", "prompt"),
    [
        ({"method": "snapkv", "budget": 64, "window": 8}, 500),
        ({"method": "h2o", "heavy": 200, "recent": 200, "interval": 16}, 100),
        ({"method": "h2o", "heavy": 50, "recent": 50, "interval": 16}, 500),
        ({"method": "h2o", "heavy": 50, "recent": 50, "granularity": "page"}, 500),
        ({"method": "streamingllm", "recent": 60}, 900),
        ({"method": "none"}, 300),
    ],
)
def test_what_is_accepted_can_be_computed_again(policy: dict[str, Any], prompt: int) -> None:
    h = Harness(page_size=16, pool_tokens=600, virtual_tokens=8192)
    h.ledger.chunk_tokens = 128
    req = AdderReq(list(range(prompt)), parse_policy(policy))
    req.sampling_params.max_new_tokens, req.sampling_params.min_new_tokens = 1000, 0
    plan = req.policy.plan(prompt, h.ledger.geometry)
    req.sglang_kv = RequestState(req, req.policy, plan)
    refusal = check_request(h.ledger, req)
    if refusal is not None:
        assert "input_ids" in refusal
        return
    answer = req.sampling_params.max_new_tokens
    for tokens in range(prompt, prompt + answer + 1):
        assert plan.peak_pages(tokens, 128) <= h.ledger.pool.num_pages
        assert plan.pages(tokens) <= h.ledger.pool.num_pages
