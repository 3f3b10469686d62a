"""`pip install .` and `pip install .[engine]`: the wheel is whole; compiler and headers stay together."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docker_engine import ROOT

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(900)]


def uv(*words: str, cwd: Path) -> str:
    found = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found, "uv comes with the dev lock"
    env = {k: v for k, v in os.environ.items() if k not in ("UV_SYSTEM_PYTHON", "VIRTUAL_ENV")}
    done = subprocess.run([found, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("entrypoint", "env", "locks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.md"), *ROOT.glob("LICENSE*")):
        shutil.copy(path, source / path.name)
    uv("build", "--wheel", "--quiet", "--out-dir", str(folder), str(source), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_alone_plans_the_rehearsal(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    uv("venv", "--quiet", "--python", sys.executable, str(venv), cwd=tmp_path)
    uv("pip", "install", "--quiet", "--python", str(venv / "bin/python"), str(wheel), cwd=tmp_path)
    done = subprocess.run(
        [venv / "bin/relaunch", "config", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "RELAUNCH_PRESET": "rehearsal"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["preset"] == "rehearsal"


def test_the_engine_extra_resolves_to_one_cuda(wheel: Path, tmp_path: Path) -> None:
    """Unconstrained, another package pulls a compiler that refuses torch's headers."""
    venv = tmp_path / "venv"
    uv("venv", "--quiet", "--python", sys.executable, str(venv), cwd=tmp_path)
    said = uv("pip", "install", "--dry-run", "--python", str(venv / "bin/python"), f"{wheel}[engine]", cwd=tmp_path)
    would = dict(re.findall(r"^ \+ ([A-Za-z0-9_.-]+)==(\S+)", said, re.M))
    assert would["sglang"] and would["torch"] and would["flashinfer-python"]
    parts = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl", "nvidia-cuda-runtime")
    assert {would[name].rsplit(".", 1)[0] for name in parts} == {"13.0"}
    locked = set(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "locks/engine.txt").read_text(), re.M))
    assert {(name, would[name]) for name in ("sglang", "torch", "flashinfer-python", "triton")} <= locked
