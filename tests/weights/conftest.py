"""A small checkpoint behind a loopback hub, and a bench that points there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakehub import FakeHub
from fakexet import FakeXetHub
from weights_kit import REPO, Bench, checkpoint

from entrypoint.weights import worker


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that is down is given up after one second instead of fifteen."""
    monkeypatch.setattr(worker, "ATTEMPTS", 2)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "hub" / REPO)


@pytest.fixture
def hub(source: Path) -> Iterator[FakeHub]:
    with FakeHub(source.parents[1]) as fake:
        yield fake


@pytest.fixture
def xet(source: Path) -> Iterator[FakeHub]:
    with FakeXetHub(source.parents[1]) as fake:
        yield fake


@pytest.fixture
def bench(tmp_path: Path, hub: FakeHub) -> Bench:
    return Bench(tmp_path, hub.url)
