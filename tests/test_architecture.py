"""Who may import whom, and the shape of the tree.

benchmarks  scripts  tests
      |
sglang_kv/*.py                      the only code that imports sglang
      |                 |
   planner              |           neither torch nor sglang
      |                 |
compression             |
      |                 |
   kernels            radix         never import each other
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "radix", "benchmarks", "scripts", "tests", "sglang_kv")
LINKED = ("kernels", "radix", "benchmarks")
MAX_LINES = 500

HOST = frozenset({"sglang", "sgl_kernel"})


@dataclass(frozen=True)
class Layer:
    """The files under one path: what of the project they may import, and what they may not."""

    path: str
    ours: tuple[str, ...]
    banned: frozenset[str] = HOST


# The first match holds. Everything else in sglang_kv/ is the runtime layer.
LAYERS = (
    Layer("kernels/", ("sglang_kv.kernels",)),
    Layer("radix/", ("sglang_kv.radix",), HOST | {"torch", "triton"}),
    Layer("sglang_kv/compression/", ("sglang_kv.compression", "sglang_kv.kernels")),
    Layer(
        "sglang_kv/planner",
        ("sglang_kv.planner", "sglang_kv.compression", "sglang_kv.presets"),
        HOST | {"torch", "transformers"},
    ),
    Layer("sglang_kv/__init__.py", (), HOST | {"torch"}),
    # The stand-in is `sgl_kernel` where it is imported.
    Layer("sglang_kv/cpu/", ("sglang_kv.cpu",), frozenset({"sglang", "torch"})),
    # `sglang-kv bench` and the like start what lies above.
    Layer("sglang_kv/cli.py", ("sglang_kv",), frozenset()),
    Layer("sglang_kv/", ("sglang_kv.runtime-layer",), frozenset()),
)
ABOVE_THE_RUNTIME = ("sglang_kv.benchmarks", "sglang_kv.cli")


def python_files() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.resolve() == path:  # each file once, under its real name
                yield path


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Every module a file imports: lazily, for types only, or by a name in a string, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            name = node.args[0]
            if called in ("import_module", "__import__") and isinstance(name, ast.Constant):
                yield node.lineno, str(name.value)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def violations(path: str, source: str) -> list[str]:
    layer = next((layer for layer in LAYERS if path.startswith(layer.path)), None)
    found = []
    for line, name in imports(source):
        top = name.split(".")[0]
        if name.startswith(".") or top in LINKED:
            found.append(f"{path}:{line}: {name}: write sglang_kv....")
        elif layer is None:
            continue
        elif top in layer.banned:
            found.append(f"{path}:{line}: {name}: this layer does not know {top}")
        elif top == "sglang_kv" and name != "sglang_kv" and not allowed(layer, name):
            found.append(f"{path}:{line}: {name}: not below this layer")
    return found


def allowed(layer: Layer, name: str) -> bool:
    if layer.ours == ("sglang_kv.runtime-layer",):
        return not any(within(name, package) for package in ABOVE_THE_RUNTIME)
    return any(within(name, package) for package in layer.ours)


def test_imports_point_down() -> None:
    found = []
    for path in python_files():
        found += violations(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/attention.py", "import sglang"),
        ("kernels/attention.py", "def lazy():\n    from sglang.srt.utils import is_cpu"),
        ("kernels/attention.py", "from sglang_kv.radix.tree import Tree"),
        ("kernels/attention.py", "from sglang_kv import pool"),
        ("kernels/csrc/tool.py", "import importlib\nimportlib.import_module('sglang')"),
        ("radix/tree.py", "import torch"),
        ("radix/tree.py", "from sglang_kv.kernels.layout import GAP"),
        ("sglang_kv/compression/snapkv.py", "from sglang_kv.pool import HeadPagePool"),
        ("sglang_kv/compression/snapkv.py", "if TYPE_CHECKING:\n    import sglang.srt"),
        ("sglang_kv/planner.py", "import torch.nn"),
        ("sglang_kv/pool.py", "from sglang_kv.benchmarks import quality"),
        ("sglang_kv/pool.py", "from sglang_kv import benchmarks"),
        ("sglang_kv/pool.py", "from .ledger import Ledger"),
        ("sglang_kv/pool.py", "import kernels"),
        ("tests/test_pool.py", "from radix.tree import Tree"),
    ],
)
def test_a_planted_violation_is_caught(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/attention.py", "import torch\nfrom sglang_kv.kernels.layout import GAP"),
        ("sglang_kv/compression/snapkv.py", "from sglang_kv.kernels.scores import window"),
        ("sglang_kv/pool.py", "import sglang.srt\nfrom sglang_kv.radix.tree import Tree"),
        ("sglang_kv/cli.py", "from sglang_kv.benchmarks import quality"),
        ("benchmarks/quality.py", "import sglang\nfrom sglang_kv.pool import HeadPagePool"),
    ],
)
def test_what_points_down_passes(path: str, source: str) -> None:
    assert violations(path, source) == []


def test_files_are_short() -> None:
    compiled = [path for path in (ROOT / "kernels/csrc").rglob("*") if path.is_file()]
    sources = (*python_files(), *compiled)
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    long = {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > MAX_LINES}
    assert not long


def test_linked_folders_are_not_packages() -> None:
    """With an `__init__.py`, `kernels/` would hide Hugging Face's package from the root."""
    for folder in (*LINKED, "scripts", "tests"):
        assert not list((ROOT / folder).rglob("__init__.py"))
    for folder in LINKED:
        link = ROOT / "sglang_kv" / folder
        assert link.is_symlink()
        assert link.readlink() == Path("..", folder)


@pytest.mark.parametrize("from_root", [True, False])
def test_hugging_face_kernels_is_not_shadowed(
    run_python: Callable[..., str], tmp_path: Path, from_root: bool
) -> None:
    code = "import importlib.util as u; print(u.find_spec('kernels').origin)"
    origin = run_python(code, cwd=ROOT if from_root else tmp_path)
    assert origin.endswith("site-packages/kernels/__init__.py")
