"""Whose request is it? Found by the server's HTTP process, and taken to the scheduler.

With ``--prefix-sharing tenant``, what a request may share depends on who sent it. That is told by
the ``--tenant-header``, which a trusted proxy sets, or else by the credential itself: whoever knows
another's credential *is* that other to the server. Nothing that a client may write into a request's
body has a say. The scheduler sees a digest only, and takes it from nobody but this server's own
HTTP process: it comes with a secret that no client knows.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from sglang_kv.compression import PolicyError
from sglang_kv.config import Options
from sglang_kv.startup import active_options

#: Key of the tenant in ``custom_params``; clients may not use it.
TENANT_KEY = "sglang_kv_tenant"
#: Prefix of the one setting through which a flush reaches the scheduler.
FLUSH_KEY = "sglang_kv_flush:"
FLUSH_PATH = "/flush_prefixes"

_tenant: ContextVar[str | None] = ContextVar("sglang_kv_tenant", default=None)


def tenant_of(request: Any, header: str | None) -> str | None:
    """A digest of who sent an HTTP request; None: it does not say, says it twice, or is none.

    Where the header stands twice, the client may have written one of them, and a proxy that appends
    its own does not tell which: nobody is believed, not even if both say the same.
    """
    headers = getattr(request, "headers", None)
    values = [] if headers is None else _values(headers, header or "authorization")
    value = values[0].strip() if len(values) == 1 else ""
    if not value:
        return None
    return hashlib.sha256(b"sglang-kv-tenant\0" + value.encode()).hexdigest()[:32]


def _values(headers: Any, name: str) -> list[str]:
    """Every value of a header; of a plain mapping the one that it has."""
    getlist = getattr(headers, "getlist", None)
    if getlist is not None:
        return list(getlist(name))
    value = headers.get(name)
    return [] if value is None else [value]


def read_tenant(options: Options, custom_params: dict[str, Any]) -> str | None:
    """The tenant that came with a request's ``custom_params`` to the scheduler."""
    secret, _, tenant = str(custom_params.get(TENANT_KEY, "")).partition(":")
    return tenant if tenant and options.secret and secret == options.secret else None


def refuse_forged(custom_params: dict[str, Any]) -> None:
    """Raise `PolicyError` for a client that names a tenant itself."""
    if TENANT_KEY in custom_params:
        raise PolicyError(f"{TENANT_KEY}: cannot be set by a request")


# -- in the HTTP process --


def _derives(options: Options | None) -> bool:
    return options is not None and options.active and options.prefix_sharing == "tenant"


def note_sender(_manager: Any, _obj: Any, request: Any | None = None) -> None:
    """A request has come in; what it is made into is made in the same context."""
    options = active_options()
    # SGLang calls this again without the HTTP request for each of several samples.
    if request is not None and options is not None and _derives(options):
        _tenant.set(tenant_of(request, options.tenant_header))


def attach_tenant(tokenized: Any, *_args: Any, **_kwargs: Any) -> None:
    """The scheduler will find the tenant beside the request's sampling parameters."""
    options, tenant = active_options(), _tenant.get()
    params = getattr(tokenized, "sampling_params", None)
    if options is None or not _derives(options) or tenant is None or params is None:
        return
    named = {TENANT_KEY: f"{options.secret}:{tenant}"}
    params.custom_params = {**(params.custom_params or {}), **named}


def add_flush_route(_result: None, manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """``POST /flush_prefixes``: a tenant's own prefixes go, and nobody else's."""
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    options = active_options()
    if server is None or options is None or not _derives(options):
        return
    if any(getattr(route, "path", None) == FLUSH_PATH for route in server.app.routes):
        return
    from sglang.srt.managers.io_struct import SetInternalStateReq
    from starlette.responses import JSONResponse

    async def flush_prefixes(request: Any) -> Any:
        tenant = tenant_of(request, options.tenant_header)
        if tenant is None:
            name = options.tenant_header or "Authorization"
            error = f"{name}: must stand there once, and say whose prefixes"
            return JSONResponse({"error": error}, 400)
        key = f"{FLUSH_KEY}{options.secret}:{tenant}"
        done = await manager.set_internal_state(SetInternalStateReq(server_args={key: 1}))
        return JSONResponse({"flushed": all(done)}, 200 if all(done) else 400)

    server.app.add_route(FLUSH_PATH, flush_prefixes, methods=["POST"])


# -- in the scheduler --


def flush_on_request(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """A flush looks like a setting with a name that only this server's HTTP process knows."""
    options = active_options()
    if options is None or not _derives(options) or not options.secret:
        return original(scheduler, recv_req)
    known = f"{FLUSH_KEY}{options.secret}:"
    tenants = [key[len(known) :] for key in recv_req.server_args if key.startswith(known)]
    if not tenants:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    for tenant in tenants:
        scheduler.tree_cache.flush_tenant(tenant)
    return SetInternalStateReqOutput(updated=True)


def flush_old_weights(manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """Other weights were loaded: what the old ones computed serves nobody any more.

    Raises RuntimeError where that cannot be seen to: what old weights computed must not be served.
    """
    options = active_options()
    if options is None or not options.active:
        return
    if manager.scheduler is None:
        raise RuntimeError("other weights were loaded, and the prefixes of the old ones are kept")
    manager.scheduler.tree_cache.weights_changed()


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"

HOOKS: list[tuple[str, Callable[..., Any], str]] = [
    (f"{_MANAGER}.__init__", add_flush_route, "AFTER"),
    (f"{_MANAGER}._init_req_state", note_sender, "BEFORE"),
    (f"{_MANAGER}._create_tokenized_object", attach_tenant, "AFTER"),
    ("sglang.srt.managers.scheduler.Scheduler.set_internal_state", flush_on_request, "AROUND"),
    (
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
        "flush_cache_after_weight_update",
        flush_old_weights,
        "BEFORE",
    ),
]
