"""The stand-in for `sgl_kernel`: there on a CPU engine, in every process, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_kv.cpu import finder

Run = Callable[..., str]
CPU = {"SGLANG_USE_CPU_ENGINE": "1"}
WHERE = "import importlib.util as u; print(u.find_spec('sgl_kernel').origin)"


@pytest.mark.parametrize("value", [None, "", "0"])
def test_absent_by_default(run_python: Run, value: str | None) -> None:
    env = {} if value is None else {"SGLANG_USE_CPU_ENGINE": value}
    assert not Path(run_python(WHERE, **env)).is_relative_to(finder.STAND_IN)


def test_costs_nothing_by_default(run_python: Run) -> None:
    loaded = run_python("import sys; print([m for m in sys.modules if 'sgl' in m])")
    assert loaded == "[]"


def test_present_on_cpu_and_light(run_python: Run) -> None:
    assert Path(run_python(WHERE, **CPU)) == finder.STAND_IN / "__init__.py"
    code = "import sys, sgl_kernel.mamba; print('torch' in sys.modules)"
    assert run_python(code, **CPU) == "False"


def test_present_in_spawned_children(run_python: Run, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing as mp\n"
        "def child(queue):\n"
        "    import sgl_kernel\n"
        "    queue.put(sgl_kernel.__file__)\n"
        "if __name__ == '__main__':\n"
        "    context = mp.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=child, args=(queue,))\n"
        "    process.start()\n"
        "    print(queue.get(timeout=600))\n"
        "    process.join()\n"
    )
    code = f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')"
    assert Path(run_python(code, **CPU)) == finder.STAND_IN / "__init__.py"


def test_every_name_the_host_imports_on_a_cpu(run_python: Run) -> None:
    """The host's own modules, and the paths by which a program reaches its engine."""
    modules = [
        "sglang.srt.entrypoints.engine",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.scheduler",
        "sglang.srt.models.llama",
        "sglang.srt.models.qwen3",
        "sglang.srt.layers.attention.linear.kda_backend",
        "sglang.kernels.ops.speculative.multi_layer_eagle",
        "sglang.kernels.ops.speculative.eagle",
        "sglang.kernels.ops.speculative.spec_tree",
    ]
    code = "import sglang as sgl; sgl.Engine.__mro__\n" + "".join(f"import {m}\n" for m in modules)
    check = (
        "import torch\n"
        "from sglang.srt.utils.common import cpu_has_amx_support, is_cpu\n"
        "from sglang.srt.distributed.device_communicators import custom_all_reduce_ops as ops\n"
        "print(is_cpu(), cpu_has_amx_support(), ops.IS_CUSTOM_AR_AVAILABLE,\n"
        "      hasattr(torch.ops.sgl_kernel, 'convert_weight_packed'))\n"
    )
    assert run_python(code + check, **CPU).splitlines()[-1] == "True False False False"


def test_calls_fail_by_name_and_features_are_missing(run_python: Run) -> None:
    code = (
        "import sgl_kernel\n"
        "from sgl_kernel.mamba import causal_conv1d_fn_cpu as op\n"
        "for call in (op, sgl_kernel.copy_all_layer_kv_cache_cpu):\n"
        "    try: call(1, x=2)\n"
        "    except RuntimeError as error: print(str(error).split()[0])\n"
        "print(hasattr(sgl_kernel, 'convert_weight_packed'), hasattr(sgl_kernel, 'silu_and_mul'))\n"
    )
    assert run_python(code, **CPU).splitlines() == [
        "sgl_kernel.mamba.causal_conv1d_fn_cpu",
        "sgl_kernel.copy_all_layer_kv_cache_cpu",
        "False False",
    ]


def test_a_real_cpu_build_is_left_alone(run_python: Run, tmp_path: Path) -> None:
    real = tmp_path / "real" / "sgl_kernel"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("")
    env = {**CPU, "PYTHONPATH": str(real.parent)}
    assert Path(run_python(WHERE, **env)) == finder.STAND_IN / "__init__.py"
    (real / "common_ops.abi3.so").write_text("")
    assert Path(run_python(WHERE, **env)) == real / "__init__.py"


def test_install_again_changes_nothing(run_python: Run) -> None:
    code = (
        "import sys; from sglang_kv.cpu import finder\n"
        "for _ in range(2): finder.install()\n"
        "print(sys.meta_path.count(finder.StandInFinder))"
    )
    assert run_python(code, **CPU) == "1"
    assert run_python(code) == "0"
