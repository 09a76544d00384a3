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
    harness: Harness

    def init_next_round_input(self, _tree: Any) -> None:
        self.harness.match(self)

    host_hit_length = swa_host_hit_length = host_loaded_length = 0

    @property
    def extend_len(self) -> int:
        return self.extend_end - self.prefix_len

    def fulfilled_storage_hit_len(self, _n: int) -> int:
        return 0

    def materialized_host_hit_len(self) -> int:
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
    req.harness = h
    h.admit(req)
    return req


class NoRotary:
    """The harness has no keys to turn."""

    refusal = None

    def turn_keys(self, *_: Any) -> None: ...


def extended(pool_tokens: int, trained: int | None, chunk: int) -> Harness:
    """A server for longer contexts than its model was trained for."""
    h = Harness(page_size=16, pool_tokens=pool_tokens, virtual_tokens=8192)
    h.ledger.chunk_tokens, h.ledger.trained_length = chunk, trained
    h.ledger.rotary = NoRotary()  # type: ignore[assignment]
    return h


def serve(h: Harness, adder: Any, req: AdderReq, answer: int) -> bool:
    """Through the gate, to its end. False: not admitted, though nothing else runs."""
    h.tree.unlock(req.lock)
    h.tree.set_reader(req.sglang_kv, None)
    gate = adder(h)
    gate.add_one_req(req, False, None)
    if req not in gate.can_run_list:
        return False
    promised = req.sglang_kv.peak_pages
    while True:
        h.alloc(req, req.extend_end)
        assert req.sglang_kv.taken_pages <= promised
        h.ledger.after_prefill([req])
        h.checkpoint(req)
        if req.extend_end >= len(req.full_untruncated_fill_ids):
            break
        adder(h).add_chunked_req(req)
    for token in range(answer):
        states = [SimpleNamespace(sglang_kv=req.sglang_kv, kv=SimpleNamespace(holds_kv=True))]
        enough = h.allocator.check_decode_capacity(num_tokens=1, tree_cache=h.tree, requests=states)
        assert enough, "nobody else is there to make room"
        h.decode(req, 5000 + token)
    return True


@pytest.mark.parametrize("trained", [None, 256])
@pytest.mark.parametrize(
    ("policy", "answer"),
    [({"recent": 124}, 8), ({"recent": 60}, 24), ({"recent": 124, "positions": "original"}, 8)],
)
def test_the_next_turn_is_admitted_where_a_cold_one_is(
    adder: Any, trained: int | None, policy: dict[str, Any], answer: int
) -> None:
    """Its session's end must not be in its own way, in the smallest pools."""
    if trained is not None and "positions" in policy:
        pytest.skip("ends at the trained length")
    policy = {"method": "streamingllm", "sinks": 4, **policy}
    warm_hits = 0
    for pool in range(208, 512, 48):
        for publish in (True, False):
            h = extended(pool, trained, 32)
            first = request(h, 200, policy, answer)
            if check_request(h.ledger, first) is not None:
                break
            assert serve(h, adder, first, answer)
            h.release(first, publish=publish)
            ids = [*first.full_untruncated_fill_ids, *range(900, 990)]
            second = AdderReq(ids, parse_policy(policy))
            second.sampling_params.max_new_tokens, second.sampling_params.min_new_tokens = answer, 0
            second.harness = h
            h.admit(second)
            if check_request(h.ledger, second) is not None:
                break
            assert serve(h, adder, second, answer), f"pool {pool}, warm {publish}"
            h.release(second, publish=True)
            warm_hits += publish
            h.check_empty()
    assert warm_hits > 1


def test_a_window_over_the_trees_pages_moves_on_copies_that_were_promised(adder: Any) -> None:
    """In pools where another request reads the same first pages."""
    served = 0
    for pool in range(192, 480, 32):
        h = extended(pool, 128, 512)
        other = request(h, 100, {"method": "none"}, 1)
        policy = {"method": "streamingllm", "sinks": 4, "recent": 75}
        req = request(h, 140, policy, 1)
        refused = check_request(h.ledger, req) or check_request(h.ledger, other)
        h.tree.unlock(req.lock)
        h.tree.set_reader(req.sglang_kv, None)
        if refused is not None or not serve(h, adder, other, 0):
            continue
        h.match(req)
        req.lock = h.tree.lock(req.last_node)
        served += serve(h, adder, req, 0)
    assert served > 2


@pytest.mark.parametrize("recent", [1, 60, 61])
@pytest.mark.parametrize("sinks", [1, 17])
def test_chunks_end_where_windows_and_chunk_fit_the_trained_length(
    adder: Any, sinks: int, recent: int
) -> None:
    h = extended(2048, 128, 512)
    req = request(h, 400, {"method": "streamingllm", "sinks": sinks, "recent": recent}, 1)
    assert check_request(h.ledger, req) is None
    h.tree.unlock(req.lock)
    h.tree.set_reader(req.sglang_kv, None)
    adder(h).add_one_req(req, False, None)
    while True:
        begin = req.prefix_len
        h.alloc(req, req.extend_end)
        assert req.extend_end - req.sglang_kv.offset <= 128
        assert req.extend_end == 400 or (req.extend_end - begin) % 16 == 0
        h.ledger.after_prefill([req])
        h.checkpoint(req)
        if req.extend_end >= 400:
            break
        adder(h).add_chunked_req(req)


def test_without_chunks_an_answer_ends_at_the_trained_length() -> None:
    """Computed again after a retraction, prompt and answer would be one forward."""
    h = extended(2048, 128, 512)
    h.ledger.chunk_tokens = None
    req = request(h, 100, {"method": "streamingllm", "sinks": 4, "recent": 28}, 200)
    assert check_request(h.ledger, req) is None
    assert req.sampling_params.max_new_tokens == 28


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
        h.alloc(req, req.extend_end)
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
