"""What do the Triton kernels take of a GPU: registers, spills, shared memory?

    python benchmarks/triton_cubins.py --arch 90

Compiles every kernel to a cubin for one architecture, which needs no GPU: the ops themselves say
which kernels they would launch and how, and the assembler that comes with Triton reports what each
takes. Appends one line, `results/triton_cubins.jsonl`; the last one of an architecture is what
tests/kernels_triton/test_cubins.py holds new code against. About two minutes on one core.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sglang_kv.benchmarks.common import record
from sglang_kv.kernels.layout import PagedStreams, allocate_pages
from sglang_kv.kernels.triton import attention, rotate, scores, transfer
from sglang_kv.kernels.triton.launch import Launch, recorded

ARCHITECTURES = (80, 90, 100)
KV_HEADS, LAYERS, MAX_PAGES = 2, 2, 1024


@dataclass(frozen=True)
class Case:
    """An op and what decides how its kernels are compiled."""

    op: str
    head_dim: int = 128
    dtype: str = "bfloat16"
    group: int = 4
    page_size: int = 16
    option: str = ""

    def __str__(self) -> str:
        shape = f"{self.head_dim} {self.dtype} group {self.group} page {self.page_size}"
        return f"{shape} {self.option}".strip()

    def launches(self, arch: int) -> list[Launch]:
        """The kernels that the op would launch on sm_`arch`."""
        with recorded(arch) as found:
            _call(self)
        return found


def _variants(op: str) -> list[Case]:
    dims = [Case(op, head_dim=d) for d in (64, 80, 128, 256)]
    dtypes = [Case(op, dtype=d) for d in ("float16", "float8_e4m3fn", "float8_e5m2")]
    options = [Case(op, option=o) for o in ("sink_q", "soft_cap")]
    return [*dims, *dtypes, *options, Case(op, group=7)]


CASES = [
    *_variants("decode"),
    Case("decode", option="scores"),
    Case("decode", head_dim=96),
    Case("decode", page_size=1),
    *_variants("extend"),
    Case("extend", head_dim=64, group=3),
    *(Case("column_sums", head_dim=d) for d in (64, 128, 256)),
    Case("column_sums", dtype="float8_e4m3fn"),
    Case("column_sums", option="decode"),
    *(Case("append", dtype=d) for d in ("bfloat16", "float8_e4m3fn", "float8_e5m2")),
    Case("append", option="decode"),
    *(Case("gather", head_dim=d) for d in (80, 128)),
    *(Case("turn_keys", dtype=d) for d in ("bfloat16", "float8_e4m3fn", "float8_e5m2")),
    Case("turned_queries"),
]


def _call(case: Case) -> None:
    pages = allocate_pages(4, case.page_size, case.head_dim, getattr(torch, case.dtype))
    table = torch.zeros(2, LAYERS, KV_HEADS, MAX_PAGES, dtype=torch.int32)
    desc = torch.zeros(2, LAYERS, KV_HEADS, 4, dtype=torch.int32)
    streams = PagedStreams(pages, table, desc, torch.arange(2, dtype=torch.int32))
    dtype = torch.bfloat16 if pages.itemsize == 1 else pages.dtype
    q = torch.zeros(2, KV_HEADS * case.group, case.head_dim, dtype=dtype)
    k = torch.zeros(2, KV_HEADS, case.head_dim, dtype=dtype)
    ints = torch.zeros(3, dtype=torch.int32)
    table_of_scores = torch.zeros(2, LAYERS, KV_HEADS, 4096)
    angles = torch.zeros(16, case.head_dim)
    options: dict[str, Any] = {"sm_scale": 0.1, "return_lse": True}
    if case.option == "sink_q":
        options["sink_q"] = q
    elif case.option == "soft_cap":
        options["logits_soft_cap"] = 30.0
    elif case.option == "scores":
        options |= {"scores": table_of_scores, "score_slots": streams.slots}
    indptr = None if case.option == "decode" else ints
    ops: dict[str, Any] = {
        "decode": lambda: attention.decode(q, streams, 1, **options),
        "extend": lambda: attention.extend(q, ints, streams, 1, **options),
        "column_sums": lambda: scores.column_sums(
            q, indptr, ints[:2], _lse(q), streams, 1, table_of_scores, streams.slots, sm_scale=0.1
        ),
        "append": lambda: transfer.append(k, k, indptr, streams, 1),
        "gather": lambda: transfer.gather(pages, *(ints[:n].long() for n in (2, 1, 2, 1, 2, 1))),
        "turn_keys": lambda: rotate.turn_keys(pages, ints[:1].long(), 3, angles),
        "turned_queries": lambda: rotate.turned_queries(q, ints[:2].long(), angles),
    }
    ops[case.op]()


def _lse(q: Tensor) -> Tensor:
    return torch.zeros(q.shape[:2])


def resources(launch: Launch, arch: int, **options: Any) -> dict[str, int]:
    """Compile for sm_`arch`: registers per thread, bytes spilled, bytes of shared memory.

    `options` go to the compiler, over the launch's own.

    The steps are those of Triton's own launch, up to the point where it would look for a device.
    """
    target = GPUTarget("cuda", arch, 32)
    kernel, backend = launch.kernel, make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    arguments, specialization, given = bind(**launch.arguments, **{**launch.options, **options})
    parsed, signature, constants, attributes = kernel._pack_args(  # noqa: SLF001
        backend, given, arguments, specialization, given
    )
    source = ASTSource(kernel, signature, constants, attributes)
    log = io.StringIO()
    knobs = triton.knobs
    with tempfile.TemporaryDirectory() as cache, knobs.cache.scope(), knobs.nvidia.scope():
        knobs.cache.dir = cache  # what is compiled already would not be reported
        knobs.nvidia.dump_ptxas_log = True
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(source, target=target, options=parsed.__dict__)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())
    registers = re.findall(r"Used (\d+) registers", log.getvalue())
    assert len(registers) == 1, log.getvalue()
    return {
        "registers": int(registers[0]),
        "spilled_bytes": sum(map(int, spills)),
        "shared_bytes": compiled.metadata.shared,
        "threads": 32 * compiled.metadata.num_warps,
    }


def measure(case: Case, arch: int) -> dict[str, dict[str, int]]:
    """`resources` of each kernel of a case, by a name that says what it is compiled for."""
    return {
        f"{launch.kernel.__name__} {case}": resources(launch, arch)
        for launch in case.launches(arch)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, required=True)
    args = parser.parse_args()
    kernels: dict[str, dict[str, int]] = {}
    for case in CASES:
        for name, found in measure(case, args.arch).items():
            kernels[name] = found
            print(f"sm_{args.arch} {name}: {found}", file=sys.stderr, flush=True)
    row = {"arch": args.arch, "triton": version("triton"), "kernels": kernels}
    record("triton_cubins", row, show=False)


if __name__ == "__main__":
    main()
