"""500 random requests at one server whose memory is too small for them.

Random policies of every method over shared prefixes, streams, batches, aborts in every phase and
bad parameters; some requests give pages under pressure, others are retracted. All of SGLang's own
memory checks are on, and ours after each scheduler step. Afterwards every request has its answer
or its expected error, both ledgers are empty, and *probes* (requests whose answer is known from
when the server was quiet) were answered as if nobody else had been there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import ENV, FLAGS, REQUESTS, install_checker, soak
from traffic import Traffic
from warm import WarmServer

pytestmark = [pytest.mark.server, pytest.mark.slow]

SEED = 1


def test_soak(demo_model: Path, text_ids: list[int], tmp_path: Path) -> None:
    env = ENV | install_checker(tmp_path / "plugin")
    with WarmServer(demo_model, *FLAGS, env=env) as server:
        assert "step checks installed" in server.log
        run = soak(server, Traffic(SEED, text_ids))
        assert "Retract requests" in server.log
        assert server.metric("sglang:num_aborted_requests_total") > 0
        assert run.seen["aborted"] > 0
        assert server.metric("sglang_kv:tokens_evicted_total") > 0
        assert run.seen["evicted"] > 0
        counted = sum(run.seen.values()) - run.seen["aborted"] - run.seen["evicted"]
        assert counted == REQUESTS
