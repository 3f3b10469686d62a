"""Every lock can be installed on every supported Python from wheels alone: nobody needs a compiler for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from docker_engine import ROOT

pytestmark = pytest.mark.packaging

LOCKS = sorted(path.stem for path in (ROOT / "locks").glob("*.txt"))
PYTHONS = ("3.11", "3.12", "3.13")
# What uv says when it cannot read the package index; anything else is a verdict on the lock.
UNREACHABLE = re.compile(r"error sending request|network was disabled|timed out|dns error", re.IGNORECASE)


def test_the_versions_tried_are_the_versions_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    minors = [int(python.partition(".")[2]) for python in PYTHONS]
    assert project["requires-python"] == f">=3.{minors[0]},<3.{minors[-1] + 1}"


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_resolves_to_wheels_alone(lock: str, python: str, tmp_path: Path) -> None:
    """As `./relaunch` installs it, but without building anything. Run outside the clone: the overrides of
    pyproject.toml would hide what the lock itself lacks."""
    command = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--dry-run"]
    command += ["--only-binary", ":all:", "--no-deps", "--require-hashes", "--python-version", python]
    command += ["--target", str(tmp_path / "site"), "-r", str(ROOT / f"locks/{lock}.txt")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    if done.returncode and UNREACHABLE.search(done.stderr) and not os.environ.get("CI"):
        pytest.skip(f"no package index can be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Would install [0-9]+ packages", done.stderr, re.MULTILINE), done.stderr
