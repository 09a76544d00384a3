import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tvm_ffi

from sglang_kv.kernels import jit

SOURCE_DIR = "sglang_kv.kernels.jit._SOURCE_DIR"
CSRC = Path(jit.__file__).parent / "csrc"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source folder with a file that compiles at once."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "empty.cpp").write_text("int nothing;\n")
    monkeypatch.setattr(SOURCE_DIR, folder)
    return folder


def test_torch_and_the_kernels_share_one_openmp_runtime() -> None:
    jit.load_kernels()
    mapped = Path("/proc/self/maps").read_text().splitlines()
    names = {os.path.basename(line.split()[-1]) for line in mapped}
    assert len([n for n in names if n.startswith(("libgomp", "libomp", "libiomp"))]) == 1


def test_a_build_is_reused_until_something_changes(sources: Path, tmp_path: Path) -> None:
    first = jit.build_kernels("native", tmp_path / "cache")
    built = first.stat().st_mtime_ns
    assert jit.build_kernels("native", tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == built
    (sources / "empty.cpp").write_text("int nothing_else;\n")
    assert jit.build_kernels("native", tmp_path / "cache") != first
    assert jit.build_kernels("plain", tmp_path / "cache") != first


def test_plain_differs_from_native_just_where_there_is_avx512(
    sources: Path, tmp_path: Path
) -> None:
    (sources / "empty.cpp").write_text("int wide =\n#ifdef __AVX512F__\n1;\n#else\n0;\n#endif\n")
    native, plain = (
        jit.build_kernels(isa, tmp_path / "cache").read_bytes() for isa in ("native", "plain")
    )
    assert (native == plain) == ("avx512f" not in Path("/proc/cpuinfo").read_text())


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="not for this CPU")
@pytest.mark.parametrize("name", sorted(path.name for path in CSRC.glob("*.cpp")))
@pytest.mark.parametrize("cpu", ["skylake-avx512", "sapphirerapids"])
def test_what_wider_cpus_compile_is_correct_here(name: str, cpu: str) -> None:
    """The code for AVX-512, without and with bf16 products, which this CPU may not run."""
    includes = [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
    command = [os.environ.get("CXX", "c++"), "-std=c++17", f"-march={cpu}", "-fopenmp"]
    command += ["-fsyntax-only", *includes, str(CSRC / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def test_another_cpu_gets_another_build(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = jit.build_kernels("native", tmp_path / "cache")
    monkeypatch.setattr("sglang_kv.kernels.jit._cpu_features", lambda: "fpu sse2")
    assert jit.build_kernels("native", tmp_path / "cache") != here


@pytest.mark.usefixtures("sources")
def test_builders_at_once_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        built = [pool.submit(jit.build_kernels, "native", tmp_path / "cache") for _ in range(4)]
        assert len({future.result() for future in built}) == 1
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1


def test_a_failed_build_shows_what_the_compiler_said(sources: Path, tmp_path: Path) -> None:
    (sources / "empty.cpp").write_text("#error out of cheese\n")
    with pytest.raises(RuntimeError, match="out of cheese"):
        jit.build_kernels("native", tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


def test_an_unknown_isa_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_KV_CPU_ISA", "avx1024")
    jit.load_kernels.cache_clear()
    with pytest.raises(ValueError, match="avx1024"):
        jit.load_kernels()
    jit.load_kernels.cache_clear()
