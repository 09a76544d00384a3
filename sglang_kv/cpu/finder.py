"""Puts the stand-in for `sgl_kernel` in place on CPU, and only there.

SGLang on CPU imports a few names from `sgl_kernel`, whose published wheel is built for CUDA and
fails to load without it. Those names are imported while SGLang's own modules load, in the main
process and in every child, before any plugin runs: so `sglang_kv_cpu.pth` calls `install` at
interpreter start, when SGLANG_USE_CPU_ENGINE is 1. On a GPU none of this is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

NAME = "sgl_kernel"
STAND_IN = Path(__file__).parent / NAME


class StandInFinder:
    """A meta-path finder for the one name `sgl_kernel`."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != NAME or has_cpu_build():
            return None
        return spec_from_file_location(
            NAME, STAND_IN / "__init__.py", submodule_search_locations=[str(STAND_IN)]
        )


def has_cpu_build() -> bool:
    """Whether someone built the real `sgl_kernel` for CPU: then it is used.

    That build has its library at the package's top; the CUDA wheel has one per architecture.
    """
    real = PathFinder.find_spec(NAME)
    folders = (real.submodule_search_locations if real else None) or ()
    return any(lib for folder in folders for lib in Path(folder).glob("common_ops.*"))


def install() -> None:
    """Idempotent; a no-op unless SGLang runs on its CPU engine."""
    wanted = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
    if wanted and StandInFinder not in sys.meta_path:
        sys.meta_path.insert(0, StandInFinder)
