"""How ops start kernels; and how their kernels are compiled where there is no GPU to start them on.

An op decides tile sizes and flags from shapes, dtypes and the device's architecture alone. So the
ops themselves, called on small CPU tensors inside `recorded`, say which kernels a GPU would run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton

#: Under `TRITON_INTERPRET=1` kernels run on the CPU, operation by operation.
INTERPRETED: bool = triton.knobs.runtime.interpret


@dataclass(frozen=True)
class Launch:
    """One kernel with everything it is started with.

    - `kernel`: a function under `triton.jit`
    - `arguments`: by name, constants for the compiler among them
    - `options`: `num_warps` and `num_stages`
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True)
class Recording:
    """What ops would have launched on an architecture, 80 for sm_80 and so on."""

    arch: int
    launches: list[Launch]


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextmanager
def recorded(arch: int) -> Iterator[list[Launch]]:
    """Within this, ops launch nothing, and leave in the list what they would on sm_`arch`.

    What they return was never written.
    """
    recording = Recording(arch, [])
    token = _recording.set(recording)
    try:
        yield recording.launches
    finally:
        _recording.reset(token)


def architecture(device: torch.device) -> int:
    """Of a CUDA device, 90 for sm_90; of anything else, that of `recorded`, or 90."""
    recording = _recording.get()
    if recording is not None:
        return recording.arch
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def launch(
    kernel: Any, grid: tuple[int, ...], *, num_warps: int, num_stages: int = 1, **arguments: Any
) -> None:
    """Start `kernel` on `grid`, on the current stream; nothing to do if a side of it is 0."""
    if 0 in grid:
        return
    options = {"num_warps": num_warps, "num_stages": num_stages}
    recording = _recording.get()
    if recording is None:
        kernel[grid](**arguments, **options)
    else:
        recording.launches.append(Launch(kernel, grid, arguments, options))
