"""KV compression for programs in SGLang's frontend language.

    import sglang as sgl
    from sglang_kv.frontend import KVRuntimeEndpoint, kv_policy

    backend = KVRuntimeEndpoint("http://127.0.0.1:30000", {"method": "streamingllm"})

    @sgl.function
    def summarise(s, document):
        s += sgl.user(document + "\\nSummarise this in one sentence.")
        with kv_policy(s, method="streamingllm", budget=512):
            s += sgl.assistant(sgl.gen("summary", max_tokens=64))
        s += sgl.user("Now in French.")
        s += sgl.assistant(sgl.gen("french", max_tokens=64))

    state = summarise.run(document=text, backend=backend)
    state.get_meta_info("summary")["kv_compression"]   # what was kept

The endpoint sends its policy with *every* request it makes: `gen`, `select`, `fork`'s commit and
the warming of common prefixes. One without it would fill the prefix cache under another policy.
`None` sends no policy, and the server's default holds; `{"method": "none"}` asks for the full
cache.

A policy is bound to a backend object, never to the calling thread. A program only queues its calls;
a worker thread per state makes them later, so anything read from the thread's context at that
moment would be the wrong program's. There are two ways to vary it:

- `program.run(backend=backend.with_policy(method=..., ...))`: one policy for a whole run;
- `with kv_policy(s, method=..., ...)`: for the calls written inside the block. Entering and leaving
  are queued among the calls, so nothing waits, blocks nest, and a `fork` inside inherits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.interpreter import ProgramState, StreamExecutor
from sglang.lang.ir import SglVariable

Policy = Mapping[str, Any]


class KVRuntimeEndpoint(RuntimeEndpoint):
    """A `RuntimeEndpoint` whose requests all carry one KV-compression policy, or none."""

    def __init__(self, base_url: str, kv_compression: Policy | None = None, **kwargs: Any) -> None:
        super().__init__(base_url, **kwargs)
        self.kv_compression = checked(kv_compression)

    def with_policy(self, **policy: Any) -> KVRuntimeEndpoint:
        """The same server under another policy; without arguments, under the server's default."""
        derived = copy.copy(self)
        derived.kv_compression = checked(policy or None)
        return derived

    def _add_images(self, s: StreamExecutor, data: dict[str, Any]) -> None:
        # The one step that all of RuntimeEndpoint's requests share, but for `cache_prefix`.
        super()._add_images(s, data)
        if self.kv_compression is not None:
            params = data["sampling_params"].setdefault("custom_params", {})
            params["kv_compression"] = dict(self.kv_compression)

    def cache_prefix(self, prefix_str: str) -> None:
        data = {"text": prefix_str, "sampling_params": {"max_new_tokens": 0}}
        self._generate_http_request(NO_IMAGES, data)


class _NoImages:
    images_: tuple[()] = ()


NO_IMAGES = _NoImages()


@contextmanager
def kv_policy(s: ProgramState, **policy: Any) -> Iterator[None]:
    """Give the calls written in this block their own policy; see the module's text."""
    executor = getattr(s, "stream_executor", None)
    if executor is None:  # a dry run, in which SGLang looks for the common prefix of a batch
        yield
        return
    if not isinstance(executor.backend, KVRuntimeEndpoint):
        raise TypeError(f"kv_policy needs a KVRuntimeEndpoint, not {executor.backend!r}")
    entered = _EnterPolicy(executor, executor.backend.with_policy(**policy))
    executor.submit(entered)
    try:
        yield
    finally:
        executor.submit(_LeavePolicy(executor, entered))


class _Step(SglVariable):
    """A queued step that changes the executor's backend and adds no text.

    The interpreter runs only expressions it knows. Of a variable it asks the source for the value:
    in its worker thread, when the step's turn has come.
    """

    def __init__(self, executor: StreamExecutor) -> None:
        super().__init__("kv_policy", source=self)
        self.source_stream_executor = self
        self.executor = executor


class _EnterPolicy(_Step):
    def __init__(self, executor: StreamExecutor, backend: KVRuntimeEndpoint) -> None:
        super().__init__(executor)
        self.backend = backend
        self.outer: KVRuntimeEndpoint | None = None

    def get_var(self, name: str) -> str:
        self.outer, self.executor.backend = self.executor.backend, self.backend
        return ""


class _LeavePolicy(_Step):
    def __init__(self, executor: StreamExecutor, entered: _EnterPolicy) -> None:
        super().__init__(executor)
        self.entered = entered

    def get_var(self, name: str) -> str:
        self.executor.backend = self.entered.outer
        return ""


def checked(policy: Policy | None) -> dict[str, Any] | None:
    """The server checks the parameters; a policy without a method cannot even be read."""
    if policy is not None and not isinstance(policy.get("method"), str):
        raise ValueError(f'a policy needs a "method", got {dict(policy)!r}')
    return None if policy is None else dict(policy)
