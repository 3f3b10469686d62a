"""`relaunch warm` without compiling anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from entrypoint.errors import Stop
from entrypoint.kernels import kernels
from entrypoint.supervisor import warm

pytestmark = pytest.mark.usefixtures("engine_packages")


def names(document: dict[str, Any]) -> list[str]:
    return [row["name"] for row in document["kernels"]]


def test_check_says_what_is_not_compiled() -> None:
    document, code = warm.run(os.environ, 120, ["norm"], check=True)
    assert code == 0 and names(document) == ["norm"]
    assert document["kernels"][0]["warm"] is False and document["needs_gpu"]


def test_check_finds_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    version = kernels.metadata.version("flashinfer-python")
    library = tmp_path / ".cache/flashinfer" / version / "120a/cached_ops/norm/norm.so"
    library.parent.mkdir(parents=True)
    library.touch()
    document, _ = warm.run(os.environ, 120, ["norm", "sampling"], check=True)
    assert [row["warm"] for row in document["kernels"]] == [True, False]


@pytest.mark.engine
def test_the_rehearsal_needs_no_fp4_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAUNCH_PRESET", "rehearsal")
    document, _ = warm.run(os.environ, 120, [], check=True)
    assert "norm" in names(document) and not {"fp4-gemm", "fused-moe", "sparse-mla"} & set(names(document))


def test_unknown_kernel_and_architecture_are_refused() -> None:
    for sm, wanted in ((120, ["nrom"]), (70, [])):
        with pytest.raises(Stop) as caught:
            warm.run(os.environ, sm, wanted, check=True)
        assert caught.value.exit_code == 78


@pytest.mark.engine
def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RELAUNCH_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(Stop) as caught:
        warm.run(os.environ, 120, ["norm"])
    assert caught.value.exit_code == 73 and str(tmp_path / "file") in caught.value.line()
