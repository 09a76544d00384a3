"""Whose request is it? As its headers say, and as the scheduler is told."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from starlette.datastructures import Headers

from sglang_kv import tenants
from sglang_kv.compression import PolicyError
from sglang_kv.config import Options


def request(**headers: str) -> Any:
    return SimpleNamespace(headers=Headers({k.replace("_", "-"): v for k, v in headers.items()}))


def test_a_tenant_is_told_by_header_or_credential() -> None:
    of = tenants.tenant_of
    one, two = request(authorization="Bearer one"), request(authorization="Bearer two")
    assert of(one, None) == of(request(Authorization=" Bearer one"), None) != of(two, None)
    assert "one" not in str(of(one, None))
    for nobody in (request(), request(authorization=" "), None, object()):
        assert of(nobody, None) is None
    # A header that names the tenant counts alone: a client's credential cannot take its place.
    assert of(one, "X-Tenant") is None
    assert of(request(x_tenant="one", authorization="a"), "X-Tenant") == of(
        request(x_tenant="one", authorization="b"), "X-Tenant"
    )


def several(*values: str, name: str = "X-Tenant", **others: str) -> Any:
    """A request in which a header stands more than once, as on the wire."""
    raw = [(name.lower().encode(), value.encode()) for value in values]
    raw += [(key.encode(), value.encode()) for key, value in others.items()]
    return SimpleNamespace(headers=Headers(raw=raw))


@pytest.mark.parametrize("header", ["X-Tenant", None])
def test_who_is_named_twice_is_nobody(header: str | None) -> None:
    """A proxy that appends its header to a client's must not let the client choose its tenant."""
    of, name = tenants.tenant_of, header or "Authorization"
    assert of(several("proxy's", name=name), header) is not None
    for values in (("client's", "proxy's"), ("proxy's", "client's"), ("one", "one"), ("", "one")):
        assert of(several(*values, name=name), header) is None
    # Other headers may stand there as often as they like.
    cookies = several("a", "b", name="Cookie", **{name.lower(): "one"})
    assert of(cookies, header) == of(several("one", name=name), header) is not None
    # What is no HTTP request of starlette's has each header once.
    plain = SimpleNamespace(headers={name: "one", "authorization": "one"})
    assert of(plain, header) == of(several("one", name=name), header)


@pytest.fixture
def derived(monkeypatch: pytest.MonkeyPatch) -> Options:
    options = Options(method="none", prefix_sharing="tenant", secret="s3cret")
    monkeypatch.setattr("sglang_kv.startup._options", options)
    return options


def tokenized(custom_params: Any = None) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom_params))


def test_the_scheduler_believes_only_this_servers_own_process(derived: Options) -> None:
    made = tokenized({"kv_compression": "none"})
    tenants.note_sender(None, None, request(authorization="Bearer one"))
    tenants.note_sender(None, None)  # one of several samples
    tenants.attach_tenant(made)
    tenant = tenants.read_tenant(derived, made.sampling_params.custom_params)
    assert tenant == tenants.tenant_of(request(authorization="Bearer one"), None)
    assert made.sampling_params.custom_params["kv_compression"] == "none"
    tenants.note_sender(None, None, request())
    nobody = tokenized()
    tenants.attach_tenant(nobody)
    assert nobody.sampling_params.custom_params is None
    for forged in (f"guess:{tenant}", tenant, f":{tenant}", "s3cret:", "s3cret"):
        params = {tenants.TENANT_KEY: forged}
        assert tenants.read_tenant(derived, params) is None
        with pytest.raises(PolicyError, match=tenants.TENANT_KEY):
            tenants.refuse_forged(params)
    assert tenants.read_tenant(Options(method="none"), {tenants.TENANT_KEY: f":{tenant}"}) is None


def test_a_tenant_flushes_its_own(derived: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the route through SGLang's own message to the tree, and past it for other settings."""
    from sglang.srt.managers.io_struct import SetInternalStateReq
    from starlette.applications import Starlette
    from starlette.testclient import TestClient

    flushed: list[str] = []
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace(flush_tenant=flushed.append))

    class Manager:
        async def set_internal_state(self, req: Any) -> list[bool]:
            return [tenants.flush_on_request(lambda *_: None, scheduler, req).updated]

    app = Starlette()
    monkeypatch.setitem(
        sys.modules,
        "sglang.srt.entrypoints.http_server",
        SimpleNamespace(app=app),
    )
    for _ in range(2):
        tenants.add_flush_route(None, Manager())
    client = TestClient(app)
    assert client.post(tenants.FLUSH_PATH).status_code == 400
    twice = [("Authorization", "Bearer two"), ("Authorization", "Bearer one")]
    refused = client.post(tenants.FLUSH_PATH, headers=twice)
    assert (refused.status_code, flushed) == (400, [])
    assert refused.json() == {
        "error": "Authorization: must stand there once, and say whose prefixes"
    }
    answer = client.post(tenants.FLUSH_PATH, headers={"Authorization": "Bearer one"})
    assert (answer.status_code, answer.json()) == (200, {"flushed": True})
    assert flushed == [tenants.tenant_of(request(authorization="Bearer one"), None)]
    assert len(app.routes) == 1
    for key in (tenants.FLUSH_KEY + "guess:" + flushed[0], "pp_max_micro_batch_size"):
        other = SetInternalStateReq(server_args={key: 1})
        assert tenants.flush_on_request(lambda *_: "SGLang's", scheduler, other) == "SGLang's"
    assert len(flushed) == 1
