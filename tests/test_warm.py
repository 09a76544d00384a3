"""A program that a launcher forks is, to itself and to its children, one that was started.

With few imports, for speed; that SGLang itself comes up so is what the server tests show.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from warm import CPU, Launcher

PROGRAM = """
import json, multiprocessing, os, sys

def child(conn, status):
    conn.send({
        "pid": os.getpid(),
        "parent": os.getppid(),
        "late": os.environ.get("LATE"),
        "name": __name__,
        "preloaded": BEFORE,
        "argv": sys.argv,
        "folder": os.getcwd(),
    })
    sys.exit(status)

BEFORE = "wave" in sys.modules
if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    os.environ["LATE"] = "set by the program"
    found = []
    for status in (0, 7, 3):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=child, args=(theirs, status))
        process.start()
        theirs.close()
        found.append(ours.recv() | {"known_as": process.pid})
        process.join()
        found[-1]["status"] = process.exitcode
    main = {"pid": os.getpid(), "argv": sys.argv, "given": os.environ["GIVEN"]}
    main |= {"path": sys.path[0], "stdin": sys.stdin.read(), "group": os.getpgid(0)}
    print(json.dumps({"main": main, "children": found}))
    sys.exit(4)
"""


@pytest.fixture(scope="module")
def warm() -> Iterator[Launcher]:
    launcher = Launcher(["wave"])  # a module that nothing else imports
    yield launcher
    launcher.stop()


@pytest.fixture(scope="module")
def told(warm: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("program").resolve()
    (folder / "program.py").write_text(PROGRAM)
    (folder / "input").write_text("from a file")
    status, output = warm.run(
        [str(folder / "program.py"), "--flag"],
        folder / "log",
        env={**os.environ, **CPU, "GIVEN": "by the test"},
        cwd=str(folder),
        stdin=str(folder / "input"),
        children=2,
    )
    assert status == 4, output
    return {**json.loads(output.splitlines()[-1]), "folder": str(folder)}


def test_a_program_finds_itself_as_started(told: dict[str, Any]) -> None:
    main = told["main"]
    assert main["argv"] == [f"{told['folder']}/program.py", "--flag"]
    assert (main["path"], main["given"]) == (told["folder"], "by the test")
    assert main["stdin"] == "from a file"
    assert main["group"] == main["pid"] != os.getpgid(0)


def test_its_children_are_spawned_ones(told: dict[str, Any]) -> None:
    for child in told["children"]:
        assert child["parent"] == told["main"]["pid"]
        assert child["pid"] == child["known_as"]
        assert child["late"] == "set by the program"
        assert (child["name"], child["folder"]) == ("__mp_main__", told["folder"])
        assert child["argv"] == told["main"]["argv"]
    assert [child["status"] for child in told["children"]] == [0, 7, 3]


def test_as_many_as_it_asked_for_have_the_imports(told: dict[str, Any]) -> None:
    assert [child["preloaded"] for child in told["children"]] == [True, True, False]


def test_what_the_imports_have_read_cannot_change(warm: Launcher, tmp_path: Path) -> None:
    env = {**os.environ, **CPU, "OMP_WAIT_POLICY": "ACTIVE"}
    with pytest.raises(ValueError, match="'OMP_WAIT_POLICY': 'ACTIVE'"):
        warm.start(["program.py"], str(tmp_path / "log"), env=env)


def test_what_runs_too_long_is_ended(warm: Launcher, tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(900)")
    said = ""
    for seconds in (1, 10, 100):  # a busy machine may not have let it speak by then
        if said.endswith("here\n"):
            break
        with pytest.raises(TimeoutError, match=f"runs for {seconds} s:") as ended:
            warm.run(
                [str(tmp_path / "endless.py")],
                tmp_path / f"log{seconds}",
                env={**os.environ, **CPU},
                timeout_s=seconds,
            )
        said = str(ended.value)
    assert said.endswith(" s:\nhere\n")


def test_a_launcher_that_cannot_import_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
        Launcher(["no_such_module"])
