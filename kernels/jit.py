"""Builds the C++ kernels at first use, and keeps the result for the next process.

A build is cached by everything that it depends on: sources, compiler, flags, the CPU's features
(so that a cache on a shared disk or in an image is not used on another CPU), and the OpenMP
runtime. It lives in `$SGLANG_KV_CACHE_DIR`, or `~/.cache/sglang_kv`.

`$SGLANG_KV_CPU_ISA` chooses the instructions: `native` (the default: what this CPU has), `avx512`
(an error where it has none) or `plain` (no AVX-512).
"""

import functools
import hashlib
import os
import platform
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch  # noqa: F401  # brings the OpenMP runtime that the kernels share
import tvm_ffi
from tvm_ffi.utils import FileLock

_SOURCE_DIR = Path(__file__).resolve().parent / "csrc"
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


@functools.cache
def load_kernels() -> Any:
    """The compiled ops, built if need be.

    They are decode, extend, append, gather, column_sums and visible_ranges.

    Raises RuntimeError with the compiler's output if the build fails, and ValueError for an
    `SGLANG_KV_CPU_ISA` that is unknown or that this CPU lacks.
    """
    return tvm_ffi.load_module(str(build_kernels(_cpu_isa(), _cache_dir())))


def build_kernels(isa: str, cache_dir: Path) -> Path:
    """The path of the shared library for `isa`, built in `cache_dir` unless it is there already.

    Several processes may call this at once: one builds, the others wait for it.
    """
    cflags = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fvisibility=hidden"]
    if isa == "plain" and platform.machine() in ("x86_64", "AMD64"):
        cflags.append("-mno-avx512f")
    # No -fopenmp for the linker: its choice would be a second runtime, fighting over the cores.
    ldflags = [str(_openmp_runtime())]
    cache_dir.mkdir(parents=True, exist_ok=True)
    name = f"kernels_{isa}_{_fingerprint(cflags + ldflags)}"
    library = cache_dir / f"{name}.so"
    with FileLock(str(cache_dir / f"{name}.lock")):
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=cache_dir) as build_dir:
                built = tvm_ffi.cpp.build(
                    name="kernels",
                    cpp_files=[str(path) for path in sorted(_SOURCE_DIR.glob("*.cpp"))],
                    extra_cflags=cflags,
                    extra_ldflags=ldflags,
                    build_directory=build_dir,
                )
                os.replace(built, library)  # complete or absent, even if we are killed
    return library


def _cpu_isa() -> str:
    isa = os.environ.get("SGLANG_KV_CPU_ISA", "native")
    if isa not in ("native", "avx512", "plain"):
        raise ValueError(f"SGLANG_KV_CPU_ISA must be native, avx512 or plain, not {isa!r}")
    if isa == "avx512" and not has_avx512():
        raise ValueError("SGLANG_KV_CPU_ISA is avx512, but this CPU has no AVX-512")
    return "native" if isa == "avx512" else isa


def has_avx512() -> bool:
    """Whether this CPU runs the kernels for 512-bit vectors; without, `native` is `plain`."""
    return set(_cpu_features().split()) >= _AVX512


def _cache_dir() -> Path:
    configured = os.environ.get("SGLANG_KV_CACHE_DIR")
    return Path(configured) if configured else Path.home() / ".cache" / "sglang_kv"


@functools.cache
def _cpu_features() -> str:
    info = Path("/proc/cpuinfo").read_text()
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", info, re.MULTILINE)
    return match.group(1).strip() if match else ""


def _openmp_runtime() -> Path:
    """The OpenMP library that torch has loaded into this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if re.match(r"lib(gomp|omp|iomp5)\b", path.name):
            return path
    raise RuntimeError("torch has loaded no OpenMP runtime, which the CPU kernels share with it")


def _fingerprint(flags: list[str]) -> str:
    compiler = os.environ.get("CXX", "c++")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    digest = hashlib.sha256()
    for part in (tvm_ffi.__version__, compiler, version.stdout, *flags, _cpu_features()):
        digest.update(f"{len(part)}:{part}".encode())
    for path in sorted(_SOURCE_DIR.iterdir()):
        source = path.read_bytes()
        digest.update(f"{path.name}:{len(source)}:".encode() + source)
    return digest.hexdigest()[:16]
