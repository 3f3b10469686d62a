"""The lanes that the tests are divided into, and what ends what a killed run has left."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import lanes
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = """
import pytest
def test_quick(): pass
@pytest.mark.supervisor
def test_supervisor(): pass
@pytest.mark.supervisor
@pytest.mark.engine
def test_engine(): pass
@pytest.mark.needs("no-such-program")
def test_lacking(): pass
"""
SETTINGS = """
[pytest]
addopts = -p lanes -p no:cacheprovider -p no:randomly -rs
markers = supervisor: s
    engine: e
    packaging: p
    needs(names): n
"""


def run(folder: Path, *words: str, **environ: str) -> str:
    """What pytest says of the sample."""
    (folder / "test_sample.py").write_text(SAMPLE)
    (folder / "pytest.ini").write_text(SETTINGS)
    env = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")}
    env |= {"PYTHONPATH": str(ROOT / "tests"), **environ}
    command = [sys.executable, "-m", "pytest", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True).stdout


def test_a_lane_runs_its_own_and_says_what_it_left_out(tmp_path: Path) -> None:
    said = run(tmp_path, "--lane", "fast")
    assert "1 passed, 1 skipped, 2 deselected" in said
    assert "left out: 1 of lane supervisor, 1 of lane engine; ./relaunch test --all" in said
    assert "1 passed, 3 deselected" in run(tmp_path, "--lane", "supervisor")


def test_workers_say_it_once(tmp_path: Path) -> None:
    said = run(tmp_path, "--lane", "fast", "-n", "2")
    assert said.count("left out: 1 of lane supervisor, 1 of lane engine;") == 1


def test_what_is_lacking_is_skipped_by_hand_and_fails_in_ci(tmp_path: Path) -> None:
    words = "needs no-such-program (Debian: apt-get install no-such-program)"
    by_hand, in_ci = run(tmp_path, "--lane", "fast"), run(tmp_path, "--lane", "fast", CI="true")
    assert words in by_hand and "1 skipped" in by_hand
    assert words in in_ci and "1 error" in in_ci


def test_lane_names_are_those_of_the_script_and_of_the_wrapper() -> None:
    spec = importlib.util.spec_from_file_location("test_lanes_script", ROOT / "scripts/test_lanes.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.LANES == lanes.LANES
    wrapper = (ROOT / "relaunch").read_text()
    assert all(f"{lane})" in wrapper or f"{lane} |" in wrapper for lane in lanes.LANES)


@pytest.fixture
def left() -> subprocess.Popen[bytes]:
    """A process that carries the mark of a run of this clone that is over."""
    ended = subprocess.Popen(["true"])
    mark = f"{lanes.ROOT}:{ended.pid}:1.00"
    ended.wait()
    return subprocess.Popen(["sleep", "600"], env={**os.environ, lanes.MARK: mark})


def test_what_a_killed_run_left_is_found_and_ended(left: subprocess.Popen[bytes]) -> None:
    running = subprocess.Popen(["sleep", "600"], env={**os.environ, lanes.MARK: f"/other:{left.pid}:1.00"})
    try:
        found = {process.pid for process in lanes.left_behind()}
        assert left.pid in found and running.pid not in found
        lanes.end_processes([psutil.Process(left.pid)])
        assert left.poll() is not None
        assert running.poll() is None
    finally:
        for process in (left, running):
            process.kill()
            process.wait()


def test_a_run_that_goes_on_keeps_its_processes() -> None:
    own = psutil.Process()
    running = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, lanes.MARK: f"{lanes.ROOT}:{own.pid}:{own.create_time():.2f}"}
    )
    try:
        assert running.pid not in {process.pid for process in lanes.left_behind()}
    finally:
        running.kill()
        running.wait()


def test_sigterm_takes_down_what_fixtures_set_up(tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text(
        "import os, pathlib, signal, pytest\n"
        "@pytest.fixture\n"
        "def made():\n"
        "    yield\n"
        "    pathlib.Path('taken-down').touch()\n"
        "def test_long(made):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    signal.pause()\n"
    )
    run(tmp_path, "test_long.py", "--lane", "fast")
    assert (tmp_path / "taken-down").exists()
