"""`./relaunch` of a clone: whose environment it builds, removes and leaves alone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from docker_engine import ROOT


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with its environment in place: the interpreter in it only prints what it is asked to run."""
    folder = tmp_path / "clone"
    shutil.copytree(ROOT / "locks", folder / "locks")
    shutil.copy(ROOT / "relaunch", folder / "relaunch")
    environment(folder, owner=folder)
    return folder


def environment(folder: Path, owner: Path) -> Path:
    venv = folder / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").write_text('#!/bin/sh\necho "ran: $*"\n')
    (venv / "bin/python").chmod(0o755)
    (venv / "root").write_text(f"{owner}\n")
    shutil.copy(ROOT / "locks/runtime.txt", venv / "runtime.txt")
    return venv


def relaunch(script: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # No Python that could build an environment: where one would be built, it ends with 78.
    env = {"PATH": "/usr/bin:/bin", "RELAUNCH_PYTHON": "/bin/false"}
    return subprocess.run(["sh", str(script), *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=30)


def test_a_symbolic_link_runs_the_clone_that_it_points_into(clone: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / ".venv").mkdir(parents=True)
    (project / ".venv/mine.txt").write_text("precious")
    (project / "relaunch").symlink_to(clone / "relaunch")
    done = relaunch(project / "relaunch", "plan", cwd=project)
    assert (done.returncode, done.stdout) == (0, "ran: -P -m entrypoint plan\n"), done.stderr
    assert (project / ".venv/mine.txt").read_text() == "precious"


@pytest.mark.parametrize("link", [False, True])
def test_an_environment_of_somebody_else_stays_and_is_named(clone: Path, tmp_path: Path, link: bool) -> None:
    shutil.rmtree(clone / ".venv")
    theirs = tmp_path / "theirs" if link else clone / ".venv"
    theirs.mkdir()
    (theirs / "mine.txt").write_text("precious")
    if link:
        (clone / ".venv").symlink_to(theirs)
    done = relaunch(clone / "relaunch", "plan", cwd=clone)
    # Asked before a Python is looked for: the environment is the first thing to mend.
    assert done.returncode == 73 and f"{clone}/.venv is in the way" in done.stderr
    assert (theirs / "mine.txt").read_text() == "precious"


def test_an_environment_of_a_clone_that_was_moved_is_built_anew(clone: Path, tmp_path: Path) -> None:
    moved = clone.rename(tmp_path / "moved")
    done = relaunch(moved / "relaunch", "plan", cwd=moved)
    assert done.returncode == 78 and "RELAUNCH_PYTHON=/bin/false" in done.stderr


def test_one_that_was_cut_off_while_it_was_built_is_built_anew(clone: Path) -> None:
    (clone / ".venv/root").rename(clone / ".venv/building")
    done = relaunch(clone / "relaunch", "plan", cwd=clone)
    assert done.returncode == 78 and "is in the way" not in done.stderr


@pytest.mark.parametrize("words", [["warm", "--check"], ["serve", "--help"], ["gateway", "-h"], ["test", "--help"]])
def test_a_question_installs_no_engine(clone: Path, words: list[str]) -> None:
    done = relaunch(clone / "relaunch", *words, cwd=clone)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"ran: -P -m entrypoint {' '.join(words)}\n", "")


@pytest.mark.parametrize("verb", ["gateway", "serve", "warm"])
def test_settings_are_read_before_gigabytes_are_installed(clone: Path, verb: str) -> None:
    (clone / ".venv/bin/python").write_text('#!/bin/sh\necho "ran: $*" >&2\nexit 78\n')
    done = relaunch(clone / "relaunch", verb, cwd=clone)
    assert done.returncode == 78 and "installing" not in done.stderr
    assert done.stderr.startswith("ran: -P -m entrypoint ")


def test_a_clone_that_cannot_be_written_is_named(clone: Path) -> None:
    """As the wrapper sees it: `test -w` says so to an ordinary user, and of a read-only file system to root too."""
    (clone / ".venv/runtime.txt").unlink()
    script = (clone / "relaunch").read_text().replace('[ -w "$root" ]', "false")
    (clone / "relaunch").write_text(script)
    done = relaunch(clone / "relaunch", "plan", cwd=clone)
    assert done.returncode == 73 and "cannot be written by" in done.stderr


def test_a_pack_is_installed_from_its_own_wheels_and_from_no_index(clone: Path, tmp_path: Path) -> None:
    (clone / ".venv/bin/python").write_text('#!/bin/sh\nenv | grep -E "^(PIP|UV)_" | sort\n')
    (tmp_path / "pack/wheels").mkdir(parents=True)
    for words in (["pack"], ["--check", "pack"]):
        done = relaunch(clone / "relaunch", "unpack", *words, cwd=tmp_path)
        wheels = tmp_path / "pack/wheels"
        assert done.stdout.splitlines() == [
            f"PIP_FIND_LINKS={wheels}",
            "PIP_NO_INDEX=1",
            f"UV_FIND_LINKS={wheels}",
            "UV_NO_INDEX=1",
            "UV_OFFLINE=1",
        ]


def test_the_first_lane_of_the_tests_needs_no_engine(clone: Path) -> None:
    shutil.copy(ROOT / "locks/dev.txt", clone / ".venv/dev.txt")
    done = relaunch(clone / "relaunch", "test", "tests/plan", "-x", cwd=clone)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "ran: -P -m pytest --lane fast -n auto --dist worksteal tests/plan -x\n"
    assert relaunch(clone / "relaunch", "test", "--lane", "slow", cwd=clone).returncode == 64
    assert relaunch(clone / "relaunch", "test", "--lane", cwd=clone).returncode == 64
