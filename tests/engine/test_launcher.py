"""The launcher runs sglang's module as `python -m` does, and collects no garbage while anything is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from entrypoint.engine import command, launcher

LAUNCHER = Path(launcher.__file__)

MAIN = """
import gc, json, multiprocessing, sys
import sglang.target
STATE = [gc.isenabled()]
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    queue = multiprocessing.SimpleQueue()
    children = [multiprocessing.Process(target=sglang.target.work, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    found = {"main_importing": STATE, "main": [gc.isenabled(), gc.get_freeze_count() > 1000],
             "argv": sys.argv, "name": __spec__.name, "path": sys.path,
             "children": [queue.get() for _ in children]}
    for child in children:
        child.join()
    print(json.dumps(found))
"""
TARGET = """
import gc, sys
IMPORTING = gc.isenabled()
def work(queue):
    queue.put({"importing": IMPORTING, "argv": sys.argv, "name": sys.modules["__main__"].__name__,
               "collecting": gc.isenabled(), "frozen": gc.get_freeze_count() > 1000, "path": sys.path})
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A directory with a small `sglang` that says what it sees."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(MAIN)
    (tmp_path / "sglang" / "target.py").write_text(TARGET)
    return tmp_path


def run(package: Path, *how: str) -> dict[str, Any]:
    environ = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(
        [sys.executable, "-P", *how, "--tp-size", "1"], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_collection_while_importing_and_collections_on_and_frozen_afterwards(package: Path) -> None:
    found = run(package, str(LAUNCHER))
    assert found["main_importing"] == [False] and found["main"] == [True, True]
    for child in found["children"]:
        assert (child["importing"], child["collecting"], child["frozen"]) == (False, True, True)


def test_main_and_children_see_what_they_see_under_the_stock_launcher(package: Path) -> None:
    fast, stock = run(package, str(LAUNCHER)), run(package, "-m", "sglang.launch_server")
    for name in ("argv", "name", "path"):
        assert fast[name] == stock[name]
        assert [child[name] for child in fast["children"]] == [child[name] for child in stock["children"]]
    assert stock["children"][0]["importing"] is True, "the fake shows the difference"


def test_an_exit_code_of_the_engine_is_the_launchers(package: Path) -> None:
    (package / "sglang" / "launch_server.py").write_text("raise SystemExit(3)")
    environ = {**os.environ, "PYTHONPATH": str(package)}
    assert subprocess.run([sys.executable, "-P", str(LAUNCHER)], env=environ, timeout=60).returncode == 3


def test_what_is_run_has_the_arguments_of_what_is_shown() -> None:
    shown = command.Command((sys.executable, *command.LAUNCHER, "--model-path", "/m"), {})
    assert shown.executed() == (sys.executable, "-P", str(LAUNCHER), "--model-path", "/m")


def test_a_program_in_the_engines_place_is_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LAUNCHER", ("fake.py",))
    assert command.Command(("python", "fake.py", "--port", "1"), {}).executed() == ("python", "fake.py", "--port", "1")


def test_the_engines_lock_has_nothing_that_only_slows_the_imports_down() -> None:
    """transformers imports scikit-learn wherever it finds it: 11% of the imports of every process."""
    lock = (Path(__file__).parents[2] / "locks" / "engine.txt").read_text()
    assert "\nscikit-learn==" not in f"\n{lock}"
