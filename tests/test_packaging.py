"""The wheel and the source archive hold everything, and an installed wheel works on its own."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_sglang import fake_sglang

ROOT = Path(__file__).resolve().parent.parent
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
LINKED = ("kernels", "radix", "benchmarks")


def build(source: Path, out: Path) -> Path:
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out))
    subprocess.run([*PIP, "wheel", *options, str(source)], check=True, cwd=out)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def package_files() -> set[str]:
    """What `sglang_kv` holds in the checkout, through its links."""
    files = set()
    for folder in ("sglang_kv", *(f"sglang_kv/{name}" for name in LINKED)):
        base = ROOT / folder
        for path in base.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                files.add(f"{folder}/{path.relative_to(base).as_posix()}")
    return files


def test_the_wheel_holds_the_package_with_its_linked_folders(wheel: Path) -> None:
    held = names(wheel)
    moved_to_the_root = {"sglang_kv/cpu/sglang_kv_cpu.pth"}
    assert held == package_files() - moved_to_the_root | {"sglang_kv_cpu.pth"}
    for expected in ("sglang_kv/kernels/attention.py", "sglang_kv/py.typed"):
        assert expected in held
    assert any(name.startswith("sglang_kv/kernels/csrc/") for name in held)


def test_nothing_is_installed_under_a_taken_name(wheel: Path) -> None:
    assert {name.split("/")[0] for name in names(wheel)} == {"sglang_kv", "sglang_kv_cpu.pth"}


def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        assert not [member.name for member in tar.getmembers() if member.issym()]
    assert names(build(archive, tmp_path)) == names(wheel)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the wheel, that sees this environment's packages but not the checkout.

    Paths from a `.pth` file are searched, but `.pth` files in them are not read: the editable
    install, which would lead to the checkout, stays out.
    """
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = ("install", "--no-deps", "--no-index", "--ignore-installed", str(wheel))
    subprocess.run([*PIP, "--python", str(python), *install], check=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "host.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(python)


def test_an_installed_wheel_works_far_from_the_checkout(
    installed: str, run_python: Callable[..., str]
) -> None:
    code = (
        "import sglang_kv, sglang_kv.compression, sglang_kv.kernels.layout\n"
        "import importlib.metadata as m\n"
        "print(sglang_kv.__file__)\n"
        "points = m.entry_points(group='sglang.srt.plugins', name='sglang_kv')\n"
        "print([point.value for point in points], all(callable(p.load()) for p in points))\n"
        "print(m.version('sglang-kv') == sglang_kv.__version__)\n"
        "import importlib.util as u; print(u.find_spec('kernels').origin)\n"
    )
    file, points, version, kernels = run_python(code, python=installed).splitlines()[-4:]
    assert Path(file).is_relative_to(Path(installed).parent.parent)
    assert points == "['sglang_kv.plugin:register'] True"
    assert version == "True"
    assert Path(kernels).parent.name == "kernels"
    assert "site-packages" in kernels


def test_an_installed_wheel_brings_the_stand_in(
    installed: str, run_python: Callable[..., str]
) -> None:
    code = "import importlib.util as u; print(u.find_spec('sgl_kernel').origin)"
    stand_in = "site-packages/sglang_kv/cpu/sgl_kernel/__init__.py"
    venv = str(Path(installed).parent.parent)
    cpu = run_python(code, python=installed, SGLANG_USE_CPU_ENGINE="1")
    assert cpu.startswith(venv)
    assert cpu.endswith(stand_in)
    assert not run_python(code, python=installed).startswith(venv)


def test_an_installed_wheel_calibrates(
    installed: str, run_python: Callable[..., str], tmp_path: Path
) -> None:
    """The demo's text is not in it, so one has to be named."""
    code = (
        "import contextlib, io, pathlib, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'tests/support')!r})\n"
        "from tiny_model import TEXT, tiny_llama, tiny_tokenizer\n"
        "from sglang_kv import cli\n"
        "tiny_llama().save_pretrained('tiny'); tiny_tokenizer().save_pretrained('tiny')\n"
        "pathlib.Path('t.txt').write_text(TEXT)\n"
        "options = ['calibrate', 'tiny', '--out', 'g.json', '--method', 'training-free',\n"
        "           '--samples', '1', '--lengths', '900', '900', '--threads', '1']\n"
        "said = io.StringIO()\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stderr(said):\n"
        "    cli.main(options)\n"
        "print('name any text' in said.getvalue())\n"
        "cli.main([*options, '--text', 't.txt'])\n"
    )
    assert run_python(code, python=installed).splitlines()[-2:] == ["True", "g.json"]
    assert '"method": "training-free"' in (tmp_path / "g.json").read_text()


def test_an_installed_wheel_makes_quality_prompts(
    installed: str, run_python: Callable[..., str], tmp_path: Path
) -> None:
    """Without the demo's text: the haystack comes out of the grammar."""
    code = (
        "import json, pathlib, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'tests/support')!r})\n"
        "from tiny_model import tiny_tokenizer\n"
        "from sglang_kv import cli\n"
        "from sglang_kv.benchmarks import prompts, quality_options\n"
        "tiny_tokenizer().save_pretrained('tiny')\n"
        "cli.main(['quality', '--model', 'tiny', '--suite', 'ruler', '--lengths', '4000',\n"
        "          '--samples', '1', '--dump-cases', 'cases.jsonl'])\n"
        "print(prompts.text_name(), quality_options.default_results())\n"
    )
    assert run_python(code, python=installed).splitlines()[-1] == "grammar quality.jsonl"
    cases = [json.loads(line) for line in (tmp_path / "cases.jsonl").read_text().splitlines()]
    assert len(cases) == 13
    assert all(3000 < len(case["prompt_ids"]) < 4000 for case in cases if case["task"] != "qa_2")


def test_an_installed_wheel_benches(
    installed: str, run_python: Callable[..., str], demo_model: Path, tmp_path: Path
) -> None:
    """All but SGLang's load generator, whose import takes too long for one test."""
    with fake_sglang(str(demo_model)) as fake:
        options = ["bench", "--base-url", fake.url, "--arms", "streamingllm 1/4"]
        options += ["--workload", "document:requests=3,context=128,output=4"]
        code = (
            f"import sys; sys.path.insert(0, {str(ROOT / 'tests/support')!r})\n"
            "import fake_load\n"
            "from sglang_kv import cli\n"
            "fake_load.install()\n"
            f"for _ in range(2): cli.main({options})\n"
        )
        table = run_python(code, python=installed)
        policies = [body["sampling_params"]["custom_params"] for body in fake.bodies("/generate")]
    (line,) = map(json.loads, (tmp_path / "throughput.jsonl").read_text().splitlines())
    assert line["proved"]["requests"] == line["completed"] == 3
    assert policies == [{"kv_compression": {"method": "streamingllm", "budget": 32}}] * 6
    assert table.count("| streamingllm 1/4 | 1.000 |") == 2


def test_an_installed_wheel_has_the_quality_suites(
    installed: str, run_python: Callable[..., str]
) -> None:
    code = "from sglang_kv import cli; cli.main(['quality', '--help'])"
    assert "--depths" in run_python(code, python=installed)


def test_an_editable_install_brings_the_stand_in_too(tmp_path: Path) -> None:
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--target", str(tmp_path))
    subprocess.run([*PIP, "install", *options, "--editable", str(ROOT)], check=True)
    assert (tmp_path / "sglang_kv_cpu.pth").is_file()
    assert not (tmp_path / "sglang_kv").exists()
