"""Fixtures for every test: an environment of its own, so that no test reads this machine's settings or state."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

import pytest

pytest_plugins = ("lanes",)

# Importing the engine into a test's process sets names like FLASHINFER_WORKSPACE_BASE for every test after it.
_AT_START = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("RELAUNCH_", "HF_", "SGLANG_", "NCCL_", "FLASHINFER_"))
}


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(_AT_START) - {"TESTS_OF_RELAUNCH"}:
        monkeypatch.delenv(name)
    for name, value in _AT_START.items():
        monkeypatch.setenv(name, value)
    # sglang writes to ~/.cache/sglang whatever XDG_CACHE_HOME says. How this user reaches package indexes, and which
    # interpreters are here, stays as it is.
    home = Path.home()
    monkeypatch.setenv("XDG_CONFIG_HOME", os.environ.get("XDG_CONFIG_HOME", str(home / ".config")))
    monkeypatch.setenv("PYENV_ROOT", os.environ.get("PYENV_ROOT", str(home / ".pyenv")))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("STATE", "CACHE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))


@pytest.fixture
def engine_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions as locks/engine.txt has them, for code that asks which are installed and needs no more of them."""
    text = (Path(__file__).parents[1] / "locks/engine.txt").read_text()
    locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: locked.get(name) or installed(name))
