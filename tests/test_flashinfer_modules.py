"""Which of FlashInfer's modules are compiled, and what is read from the compiler's words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_kv.benchmarks import flashinfer_modules, kv_tables
from sglang_kv.benchmarks.flashinfer_modules import Module, kernels, link_folder, modules, taken
from sglang_kv.kernels.flashinfer import wrappers

# Of nvcc 13.0 with -Xptxas=-v, names cut short.
SAID = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN10flashinfer5firstE' for 'sm_90a'
ptxas info    : Function properties for _ZN10flashinfer5firstE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 16 bytes smem
ptxas info    : Compile time = 412.302 ms
ptxas info    : Compiling entry function '_ZN10flashinfer6secondE' for 'sm_90a'
ptxas info    : Function properties for _ZN10flashinfer6secondE
    40 bytes stack frame, 36 bytes spill stores, 52 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 40 bytes cumulative stack size
"""


def test_what_ptxas_says() -> None:
    first, second = kernels(SAID)
    assert first == {"registers": 128, "spilled_bytes": 0}
    assert second == {"registers": 255, "spilled_bytes": 88}
    assert taken([SAID, "", SAID.replace("255", "64")]) == {
        "kernels": 4,
        "most_registers": 255,
        "spilling_kernels": 2,
        "most_spilled_bytes": 88,
    }
    with pytest.raises(ValueError, match="no registers"):
        list(kernels(SAID.split("ptxas info    : Used 255")[0]))


def test_a_toolkit_without_libraries_gets_their_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("home/include", "packages/nvidia/cu13/include"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr("sys.path", [str(tmp_path / "packages")])
    linked, home = tmp_path / "linked", tmp_path / "home"
    assert flashinfer_modules.more_headers(linked, home) == []
    there = tmp_path / "packages/nvidia/cu13/include"
    for name in ("curand_kernel.h", "curand.h", "cuda_runtime.h"):
        (there / name).touch()
    for _ in range(2):  # a second run finds its links
        assert flashinfer_modules.more_headers(linked, home) == [linked]
    # The compiler's own headers stay the compiler's: those beside it may be of another version.
    assert sorted(path.name for path in linked.iterdir()) == ["curand.h", "curand_kernel.h"]
    (home / "include/curand_kernel.h").touch()
    assert flashinfer_modules.more_headers(linked, home) == []


def test_modules_are_those_of_our_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer names a module by what it was asked for; 8-bit pages have FA2 alone."""
    core, env = (pytest.importorskip(f"flashinfer.jit.{name}") for name in ("core", "env"))
    monkeypatch.setattr(core.current_compilation_context, "TARGET_CUDA_ARCHS", {(9, "0a")})
    monkeypatch.setattr(env, "FLASHINFER_GEN_SRC_DIR", tmp_path)
    names = {module: module.spec().name for module in modules()}
    assert len(set(names.values())) == len(names) == 13
    assert {module.head_dim for module in names} - {0} <= set(wrappers.HEAD_DIMS)
    for module, name in names.items():
        if module.backend == "merge":
            assert name == "cascade"
            continue
        pages = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}[module.kv_dtype]
        for part in (
            f"dtype_q_bf16_dtype_kv_{pages}_dtype_o_bf16_dtype_idx_i32_",
            f"head_dim_qk_{module.head_dim}_head_dim_vo_{module.head_dim}_",
            f"use_swa_{module.window}_use_logits_cap_False_f16qk_False",
        ):
            assert part in name
        assert name.endswith("_sm90") == (module.backend == "fa3")
        assert module.backend == "fa2" or pages == "bf16"
    assert kv_tables.short(Module("fa2", 64, torch.float8_e4m3fn, True).spec().name) == (
        "FA2, head size 64, e4m3 pages, window"
    )


def test_which_backend_prefill_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's own choice on Hopper, for each head size and dtype that is listed."""
    utils = pytest.importorskip("flashinfer.utils")
    monkeypatch.setattr(utils, "is_sm90a_supported", lambda device: True)
    listed = {(m.head_dim, m.kv_dtype, m.backend) for m in modules() if m.head_dim}
    for head_dim, kv_dtype, _ in listed:
        chosen = utils.determine_attention_backend(
            torch.device("cpu"),
            *(0, False, False, torch.bfloat16, kv_dtype),
            head_dim_qk=head_dim,
            head_dim_vo=head_dim,
        )
        assert (head_dim, kv_dtype, chosen) in listed


def test_what_is_missing_to_link_is_made_up(tmp_path: Path) -> None:
    home = tmp_path / "cuda"
    (home / "lib").mkdir(parents=True)
    (home / "lib/libcudart.so.13").write_bytes(b"\x7fELF")
    for _ in range(2):
        folder = link_folder(tmp_path / "link", home)
    assert (folder / "libcudart.so").resolve() == home / "lib/libcudart.so.13"
    assert (folder / "libcuda.so").read_bytes()[:4] == b"\x7fELF"


def test_an_object_that_fails_is_a_line_that_says_so(tmp_path: Path) -> None:
    """The build with a compiler that takes one file and not the other."""

    a, b, whole = (tmp_path / name for name in ("a.o", "b.o", "m.so"))

    class Spec:
        build_dir, ninja_path, jit_library_path = tmp_path, tmp_path / "build.ninja", whole

        def write_ninja(self) -> None:
            rule = "rule cuda_compile\n  command = ! grep -q broken $in && cat $in | tee $out\n"
            edges = [f"build {o}: cuda_compile {o.with_suffix('.cu')}\n" for o in (a, b)]
            link = f"rule link\n  command = cat $in > $out\nbuild {whole}: link {a} {b}\n"
            self.ninja_path.write_text(rule + "".join(edges) + link)

    (tmp_path / "a.cu").write_text(SAID)
    (tmp_path / "b.cu").write_text("broken")
    spec = Spec()
    failed = flashinfer_modules.build(spec)
    assert (failed["ok"], failed["failed"]) == (False, "b.o")
    (tmp_path / "b.cu").write_text("whole")
    made = flashinfer_modules.build(spec)
    assert made["ok"] is True
    assert (made["objects"], made["kernels"], made["most_registers"]) == (2, 2, 255)
    assert made["so_bytes"] > 0


def test_a_folder_without_nvcc_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        flashinfer_modules.main(["--cuda-home", str(tmp_path)])
    assert "--cuda-home: no bin/nvcc in" in capsys.readouterr().err
