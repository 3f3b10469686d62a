"""Fixtures for every test: an environment of its own, so that no test reads this machine's settings or state."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("RELAUNCH_", "HF_", "SGLANG_", "NCCL_")):
            monkeypatch.delenv(name)
    # sglang writes to ~/.cache/sglang whatever XDG_CACHE_HOME says. How this user reaches package indexes, and which
    # interpreters are here, stays as it is.
    home = Path.home()
    monkeypatch.setenv("XDG_CONFIG_HOME", os.environ.get("XDG_CONFIG_HOME", str(home / ".config")))
    monkeypatch.setenv("PYENV_ROOT", os.environ.get("PYENV_ROOT", str(home / ".pyenv")))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("STATE", "CACHE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
