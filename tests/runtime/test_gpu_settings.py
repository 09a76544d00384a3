"""What is settled, turned off and hooked for a GPU, as far as none is needed to see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.arg_groups import memory_hook, resolution_hooks
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.models import utils
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import ServerArgs

from sglang_kv import hooks, plugin, runtime, startup
from sglang_kv.config import Options
from sglang_kv.kernel_paths import AUTO, FLASHINFER, TRITON, choose

ON, OFF = Options(method="none"), Options()
SIZING, GLUE = envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING, envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH


class Reached(Exception):
    """The step of SGLang's resolution that a test is about."""


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The operator wants all that would go past the head pages; what a test sets is put back."""
    for switch in (SIZING, GLUE):
        monkeypatch.setenv(switch.name, "1")
    monkeypatch.setattr(startup, "_options", None)
    monkeypatch.setattr(plugin, "verify", lambda: None)  # this process has no hooks in it
    before = runtime.current()
    yield
    runtime.install(before)


def server_args(options: Options, device: str, **fields: Any) -> ServerArgs:
    args = ServerArgs(model_path="no_such_model", device=device, **fields)
    options.attach(args)
    return args


# -- SGLang's arguments --


@pytest.mark.parametrize(("options", "wanted"), [(ON, False), (OFF, True)])
def test_memory_is_divided_knowing_that_pools_are_sized_once(
    demo_model: Any, monkeypatch: pytest.MonkeyPatch, options: Options, wanted: bool
) -> None:
    """SGLang's own resolution for a GPU, up to where it sets memory aside for graphs."""
    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    register = resolution_hooks.register_resolution_hook
    register("handle_missing_default_values")(startup.fill_defaults)
    register("handle_attention_backend_compatibility")(startup.settle_gpu)
    asked: list[bool] = []

    def planned(_args: Any) -> bool:
        asked.append(SIZING.get())
        raise Reached

    monkeypatch.setattr(memory_hook, "post_capture_kv_sizing_planned", planned)
    monkeypatch.setattr(memory_hook, "get_device_memory_capacity", lambda _device: 80 * 1024)
    args = server_args(options, "cuda:0")
    args.model_path = str(demo_model)
    with pytest.raises(Reached):
        args.resolve_once()
    assert asked == [wanted]


def test_a_cpu_keeps_the_operators_settings() -> None:
    args = server_args(ON, "cpu")
    startup.fill_defaults(args, lambda _args: None)
    startup.settle_gpu(args, lambda _args: None)
    assert SIZING.get()
    assert GLUE.get()


@pytest.mark.parametrize(
    ("options", "device", "settled"), [(ON, "cuda", True), (ON, "cpu", False), (OFF, "cuda", False)]
)
def test_graphs_of_prefills_and_of_metadata_are_off(
    options: Options, device: str, settled: bool
) -> None:
    """After SGLang's own step, which says what graphs there are."""
    args = server_args(options, device)

    def previous(given: Any) -> None:
        graphs = CudaGraphConfig(
            decode=PhaseConfig(backend=Backend.FULL, max_bs=8),
            prefill=PhaseConfig(backend=Backend.BREAKABLE, bs=[64]),
        )
        declare_resolution(given, "test", cuda_graph_config=graphs)

    startup.settle_gpu(args, previous)
    graphs = resolving_view(args).cuda_graph_config
    assert graphs.prefill.backend == (Backend.DISABLED if settled else Backend.BREAKABLE)
    assert graphs.decode == PhaseConfig(backend=Backend.FULL, max_bs=8)
    assert GLUE.get() is not settled


def test_no_graphs_stay_none() -> None:
    args = server_args(ON, "cuda", disable_cuda_graph=True)
    startup.settle_gpu(args, lambda _args: None)
    assert resolving_view(args).cuda_graph_config is None


# -- hooks --


def compressing() -> None:
    runtime.install(SimpleNamespace())  # type: ignore[arg-type]


def hooked(found: list[tuple[str, Callable[..., Any], str]], name: str) -> None:
    """Apply the hook of that name as SGLang does, to its target as it is now."""
    ((target, hook, kind),) = [each for each in found if each[1].__name__ == name]
    HookRegistry._apply_target(target, [(HookType[kind], hook, None)])  # noqa: SLF001


@pytest.mark.parametrize(
    ("can", "serves", "runs"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_graph_runs_what_it_can_and_what_it_serves(
    monkeypatch: pytest.MonkeyPatch, can: bool, serves: bool, runs: bool
) -> None:
    runner = decode_cuda_graph_runner.DecodeCudaGraphRunner
    monkeypatch.setattr(runner, "can_run_graph", lambda _self, _batch: can)
    hooked(hooks.GPU_HOOKS, "_can_run_graph")
    made = object.__new__(runner)
    made.attn_backend = SimpleNamespace(graph_serves=lambda: serves)
    runtime.install(None)
    assert made.can_run_graph(None) is can
    compressing()
    assert made.can_run_graph(None) is runs


def test_no_fused_writer_goes_past_the_head_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "enable_fused_set_kv_buffer", lambda _batch: True)
    hooked(hooks.HOOKS, "_enable_fused_set_kv_buffer")
    runtime.install(None)
    assert utils.enable_fused_set_kv_buffer(None) is True
    compressing()
    assert utils.enable_fused_set_kv_buffer(None) is False


def test_graph_hooks_are_for_machines_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(hooks.GPU_HOOKS) == 1
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        found = plugin._all_hooks()  # noqa: SLF001
        assert all((hook in found) is has_gpu for hook in hooks.GPU_HOOKS)
        assert all(hook in found for hook in hooks.HOOKS)


def test_flashinfer_on_a_gpu_takes_queries_of_16_bits() -> None:
    gpu = torch.device("cuda")
    assert choose(AUTO, gpu, 64, 3, torch.float16) == FLASHINFER
    assert choose(AUTO, gpu, 64, 3, torch.float32) == TRITON
    with pytest.raises(ValueError, match="has no kernel for queries of torch"):
        choose(FLASHINFER, gpu, 64, 3, torch.float32)
