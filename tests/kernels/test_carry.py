"""Compiled kernels that are carried: their times, those of the installation there, and when they are not used."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from entrypoint.kernels import carry, cuda_home, kernels

COMPILER_NS = 1_700_000_000_123_456_789
LATER_NS = COMPILER_NS + 10**15


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages that were installed just now, with a compiler among them."""
    root = tmp_path / "packages"
    for name in ("nvidia/cu13/bin/nvcc", "flashinfer/data/norm.cuh", "flashinfer/norm.py", "old.h"):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        os.utime(file, ns=(LATER_NS, LATER_NS))
    os.utime(root / "old.h", ns=(1, 1))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(root))
    monkeypatch.setattr(cuda_home, "wheels", lambda: root / "nvidia/cu13")
    monkeypatch.setattr(kernels, "has_engine", lambda: True)
    return root


def compiled(cache: Path) -> Path:
    library = kernels.directory(cache) / ".cache/flashinfer/norm.so"
    library.parent.mkdir(parents=True)
    library.write_text("code")
    os.utime(library, ns=(LATER_NS, LATER_NS))
    return library


def carried(cache: Path) -> dict[str, object]:
    found = carry.describe(cache)
    assert found is not None
    return found | {"compiler_mtime_ns": COMPILER_NS}


def test_nothing_is_carried_where_nothing_is_compiled(installation: Path, tmp_path: Path) -> None:
    assert carry.describe(tmp_path / "cache") is None
    compiled(tmp_path / "cache")
    assert carry.describe(tmp_path / "cache") is not None


def test_no_source_is_newer_than_the_carried_kernels(installation: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    library = compiled(cache)
    described = carried(cache)
    carry.write(cache, tmp_path / "kernels.tar")
    library.unlink()
    library.parent.rmdir()
    library.parents[1].rmdir()
    assert carry.obstacle(described, cache) is None
    carry.read(described, tmp_path / "kernels.tar", cache)
    assert library.read_text() == "code"
    # Never later than ninja's log says, if only by a nanosecond.
    assert library.stat().st_mtime_ns == LATER_NS // 10**9 * 10**9
    times = {path.name: path.stat().st_mtime_ns for path in installation.rglob("*") if path.is_file()}
    assert times == {"nvcc": COMPILER_NS, "norm.cuh": COMPILER_NS, "norm.py": LATER_NS, "old.h": 1}


def test_kernels_of_another_place_are_not_used_and_it_is_said_why(
    installation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(tmp_path / "cache")
    described = carried(tmp_path / "cache")
    assert "RELAUNCH_CACHE_DIR" in str(carry.obstacle(described, tmp_path / "elsewhere"))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/another/path")
    assert "another path" in str(carry.obstacle(described, tmp_path / "cache"))
