"""The links: when they are not measured, what is kept of them, what doctor and the table say of a slow pair."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from entrypoint.config import loading
from entrypoint.doctor import gpu_checks
from entrypoint.doctor.host_report import HostReport
from entrypoint.errors import Stop
from entrypoint.host.inventory import Gpu, Inventory
from entrypoint.host.nvml import GpuHealth
from entrypoint.state import links as stored
from entrypoint.state.lock import Lock
from entrypoint.tuning import links
from entrypoint.ui import tables

GB = 10**9
BOX = Inventory(tuple(Gpu(index, "H200", 90, 1 << 37, 1 << 37, pci_bus_id=f"0000:0{index}") for index in range(2)))
HOST = {"gpu": 0, "to_gpu_seconds": 9e-6, "to_host_seconds": 9e-6} | dict.fromkeys(
    ("to_gpu_bytes_per_second", "to_host_bytes_per_second"), 50 * GB
)


def measured(*rates: float, peer_access: bool = True) -> dict[str, Any]:
    pairs = [
        {"from": 0, "to": number, "bytes_per_second": rate, "seconds": 8e-6, "peer_access": peer_access or number == 0}
        for number, rate in enumerate(rates)
    ]
    return {"host": [HOST], "pairs": pairs, "all_reduce": [{"bytes": 12288, "seconds": 2e-5}]}


def refusal(box: Inventory) -> str:
    with pytest.raises(Stop) as stop:
        links.measure(box, loading.load().settings, os.environ)
    return stop.value.line()


def test_without_gpus_there_is_nothing_to_measure() -> None:
    assert "there are no links to measure: this box has no GPU" in refusal(Inventory())
    assert "recorded elsewhere" in refusal(replace(BOX, recorded=True))


def test_nothing_is_measured_while_a_supervisor_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAUNCH_STATE_DIR", str(tmp_path))
    lock = Lock(tmp_path)
    lock.acquire()
    try:
        assert f"only while nothing is served: supervisor {os.getpid()}" in refusal(BOX)
    finally:
        lock.release()


def test_what_was_measured_is_kept_until_the_gpus_are_others(tmp_path: Path) -> None:
    stored.write(tmp_path, BOX, measured(GB))
    assert stored.read(tmp_path, BOX) == measured(GB)
    assert stored.read(tmp_path, replace(BOX, gpus=BOX.gpus[:1])) is None


def test_doctor_names_the_slow_pair_and_by_how_much() -> None:
    gpus = tuple(GpuHealth(**vars(gpu)) for gpu in BOX.gpus)

    def judged(found: dict[str, Any] | None) -> list[tuple[str, str]]:
        checks = gpu_checks.checks(HostReport(gpus=gpus, links=found))
        return [(check.verdict, check.detail) for check in checks if check.id == "links"]

    assert judged(None) == []
    assert judged(measured(50 * GB, 48 * GB))[0][0] == "pass"
    verdict, detail = judged(measured(50 * GB, 10 * GB, peer_access=False))[0]
    assert verdict == "warn" and "GPU 0 to 1 moves" in detail and "through host memory; 1 of 2 pairs" in detail


def test_the_table_shows_every_link() -> None:
    out = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    tables.hardware(BOX, out, measured(50 * GB, 10 * GB))
    shown = out.export_text()
    out.file.close()
    for text in ("host and GPU 0", "GPU 0 to 1", "all-reduce, 12", "20.0 µs"):
        assert text in shown


@pytest.mark.engine
def test_the_child_times_all_reduces_between_processes() -> None:
    found = links.ask(2, "cpu", os.environ)
    assert [row["bytes"] for row in found["all_reduce"]] == [12288, 98304]
    assert all(row["seconds"] > 0 for row in found["all_reduce"])
