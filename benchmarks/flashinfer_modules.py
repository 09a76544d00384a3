"""Do FlashInfer's own modules for our shapes compile for Hopper, and what do they take?

    python benchmarks/flashinfer_modules.py --cuda-home /usr/local/cuda --only head_dim_qk_64

FlashInfer builds a module when it is first asked for one. Here it is asked as
`kernels/flashinfer/attention.py` asks, and instead of loading the module, which needs a GPU, nvcc
compiles it for one architecture, an object at a time. A run that was stopped goes on where it was.
One line per module in `results/flashinfer_modules.jsonl`; minutes of CPU each.

Linked with the CUDA runtime that is found, and, where no driver is installed, with an empty
libcuda: a shared object may be linked so, and not be loaded.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks.common import RESULTS, record
from sglang_kv.benchmarks.records import lines

NAME = "flashinfer_modules"


@dataclass(frozen=True)
class Module:
    """What a plan of ours makes FlashInfer build. ``backend`` "merge" is that of its merging."""

    backend: str
    head_dim: int = 0
    kv_dtype: torch.dtype = torch.bfloat16
    window: bool = False

    def spec(self) -> Any:
        """FlashInfer's recipe for it."""
        if self.backend == "merge":
            from flashinfer.cascade import get_cascade_module

            return requested(get_cascade_module)
        from flashinfer.prefill import get_batch_prefill_module

        wide, plain, no_cap, no_fp16 = torch.bfloat16, 0, False, False
        dims = (self.head_dim, self.head_dim)
        return requested(
            functools.partial(
                get_batch_prefill_module,
                self.backend,
                *(wide, self.kv_dtype, wide, torch.int32, *dims, plain),
                *(self.window, no_cap, no_fp16),
            )
        )


def modules() -> list[Module]:
    """Those of a model with 16-bit queries and no soft cap on Hopper, smallest first.

    Decode asks for FA2's tensor-core kernels, which are those of its prefill. Prefill leaves the
    choice to FlashInfer, which takes FA3 for 16-bit pages and FA2 for 8-bit ones. Windows are
    other modules.
    """
    found = [Module("merge")]
    for head_dim in (64, 128):
        for window in (False, True):
            for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn):
                found.append(Module("fa2", head_dim, kv_dtype, window))
            found.append(Module("fa3", head_dim, torch.bfloat16, window))
    return found


class _Requested(Exception):
    def __init__(self, spec: Any):
        super().__init__(spec.name)
        self.spec = spec


def requested(ask: Any) -> Any:
    """The recipe of the first module that ``ask`` would build and load."""
    from flashinfer.jit.core import JitSpecNvcc

    def stop(spec: Any) -> Any:
        raise _Requested(spec)

    with mock.patch.object(JitSpecNvcc, "build_and_load", stop):
        try:
            ask()
        except _Requested as found:
            return found.spec
    raise RuntimeError("FlashInfer asked for no module: it was loaded in this process already")


def kernels(log: str) -> Iterator[dict[str, int]]:
    """Of each kernel in what ptxas said: registers of a thread, and bytes that it spills."""
    for part in log.split("Compiling entry function")[1:]:
        used = re.search(r"Used (\d+) registers", part)
        if used is None:
            raise ValueError(f"ptxas named a kernel and no registers: {part[:200]}")
        spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", part)
        yield {"registers": int(used[1]), "spilled_bytes": sum(map(int, spilled))}


def taken(logs: list[str]) -> dict[str, int]:
    """Of all kernels of a module: how many, most registers, how many spill, and how much."""
    found = [kernel for log in logs for kernel in kernels(log)]
    spilled = [kernel["spilled_bytes"] for kernel in found]
    return {
        "kernels": len(found),
        "most_registers": max((kernel["registers"] for kernel in found), default=0),
        "spilling_kernels": sum(n > 0 for n in spilled),
        "most_spilled_bytes": max(spilled, default=0),
    }


def link_folder(folder: Path, cuda_home: Path) -> Path:
    """A folder with the libraries that FlashInfer links by name and ``cuda_home`` lacks by it."""
    folder.mkdir(parents=True, exist_ok=True)
    runtimes = [p for lib in ("lib64", "lib") for p in (cuda_home / lib).glob("libcudart.so*")]
    runtime = folder / "libcudart.so"
    if runtimes and not runtime.exists():
        runtime.symlink_to(min(runtimes))
    driver = folder / "libcuda.so"
    if not driver.exists():
        empty = ["c++", "-shared", "-x", "c++", "/dev/null", "-o", str(driver)]
        subprocess.run(empty, check=True)
    return folder


def more_headers(folder: Path, cuda_home: Path) -> list[Path]:
    """A folder with headers that FA3's sources include and ``cuda_home`` lacks: CUDA's compiler
    alone has none of its libraries'. They come with torch's packages for CUDA, beside headers of
    the compiler that may be of another version, so they are linked one by one."""
    wanted = "curand_kernel.h"
    if (cuda_home / "include" / wanted).exists():
        return []
    packages = [Path(part) / "nvidia" for part in sys.path]
    found = [path.parent for home in packages for path in sorted(home.glob(f"*/include/{wanted}"))]
    if not found:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    for header in found[0].glob("curand*.h"):
        link = folder / header.name
        link.unlink(missing_ok=True)
        link.symlink_to(header.resolve())
    return [folder]


def objects(spec: Any) -> list[Path]:
    """What is compiled by nvcc, by the recipe's own file: FlashInfer's list has other names."""
    found = ninja(spec, "-t", "targets", "rule", "cuda_compile")[1].splitlines()
    if not found:
        raise RuntimeError(f"{spec.ninja_path} has nothing for nvcc")
    # Kernels first: they are what may not compile, and bindings take long.
    return sorted(map(Path, found), key=lambda path: "binding" in path.name)


def ninja(spec: Any, *arguments: str) -> tuple[bool, str, float]:
    """Run it, to make the file that is named: whether it worked, what was said, CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["ninja", "-v", "-j1", "-f", str(spec.ninja_path), *arguments]
    done = subprocess.run(command, cwd=spec.build_dir, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode == 0, done.stdout + done.stderr, seconds


def build(spec: Any) -> dict[str, Any]:
    """Compile and link; what it took. Objects of an earlier run are kept, with their figures."""
    spec.write_ninja()
    seconds, logs = 0.0, []
    for path in objects(spec):
        said, clock = path.with_suffix(".said"), path.with_suffix(".seconds")
        if not (path.exists() and clock.exists()):
            ok, text, spent = ninja(spec, str(path))
            said.write_text(text)
            if not ok:
                return {"ok": False, "failed": path.name, "error": text[-2000:]}
            clock.write_text(str(spent))
            print(f"{path.name}: {spent:.0f} s of CPU", file=sys.stderr, flush=True)
        seconds += float(clock.read_text())
        logs.append(said.read_text())
    found = {"objects": len(logs), "cpu_s": round(seconds, 1), **taken(logs)}
    ok, text, _ = ninja(spec, str(spec.jit_library_path))
    if not ok:
        return {"ok": False, **found, "failed": "link", "error": text[-2000:]}
    return {"ok": True, **found, "so_bytes": spec.jit_library_path.stat().st_size}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="modules with this in their names")
    parser.add_argument("--list", action="store_true", help="the names, and nothing else")
    parser.add_argument("--again", action="store_true", help="those with a line, too")
    parser.add_argument("--arch", default="9.0a", help="compute capability (%(default)s)")
    parser.add_argument("--cuda-home", type=Path, help="with bin/nvcc and include")
    work = Path(tempfile.gettempdir()) / NAME
    parser.add_argument("--work", type=Path, default=work, help="for objects (%(default)s)")
    args = parser.parse_args(argv)
    if args.cuda_home and not (args.cuda_home / "bin/nvcc").exists():
        parser.error(f"--cuda-home: no bin/nvcc in {args.cuda_home}")
    # FlashInfer reads these when it is imported.
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = args.arch
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(args.work.resolve())
    if args.cuda_home:
        os.environ["CUDA_HOME"] = str(args.cuda_home.resolve())
    from flashinfer.jit.cpp_ext import get_cuda_path

    home = Path(get_cuda_path())
    os.environ["FLASHINFER_EXTRA_LDFLAGS"] = f"-L{link_folder(args.work / 'link', home)}"
    os.environ["NVCC_APPEND_FLAGS"] = "-Xptxas=-v"
    if headers := more_headers(args.work.resolve() / "headers", home):
        os.environ["CPATH"] = os.pathsep.join([str(headers[0]), os.environ.get("CPATH", "")])
    said = subprocess.run([home / "bin/nvcc", "--version"], capture_output=True, text=True).stdout
    nvcc = re.findall(r"V([\d.]+)", said)
    about = {"arch": args.arch, "nvcc": nvcc[0], "flashinfer": version("flashinfer-python")}
    done = {row["arm"] for row in lines(NAME) if row["ok"] and about.items() <= row.items()}
    for module in modules():
        spec = module.spec()
        if args.only not in spec.name:
            continue
        if args.list:
            print(spec.name, "(has a line)" if spec.name in done else "")
        elif args.again or spec.name not in done:
            record(NAME, {"arm": spec.name, **about, **build(spec)}, RESULTS / f"{NAME}.jsonl")


if __name__ == "__main__":
    main()
