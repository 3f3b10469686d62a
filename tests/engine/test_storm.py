"""The storm of benchmarks/storm.py, small: 200 rounds on the fake tree, five on the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervisor import ROOT

STORM = str(ROOT / "benchmarks" / "storm.py")
FAKE_SEEDS = range(5)


def storm(out: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", STORM, "--out", str(out), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, tuple[subprocess.Popen[str], Path]]]:
    folder = tmp_path_factory.mktemp("fakes")
    running = {}
    for seed in FAKE_SEEDS:
        out = folder / f"{seed}.json"
        running[seed] = storm(out, "--fake", "--rounds", "40", "--seed", str(seed)), out
    yield running
    for process, _ in running.values():
        process.kill()
        process.wait()


@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_five_faults_on_the_real_engine_always_end_ready(tmp_path: Path) -> None:
    # Draws recovering, ready (twice), loading and spawn; main, scheduler and detokenizer; one of them stopped.
    process = storm(tmp_path / "real.json", "--rounds", "5", "--seed", "1435")
    output = process.communicate()[0]
    assert process.returncode == 0, output[-3000:]
    report = json.loads((tmp_path / "real.json").read_text())
    assert report["summary"]["struck"] == 5
    assert report["end"] == {"exit_code": 0, "left": []}


@pytest.mark.supervisor
@pytest.mark.timeout(1200)
def test_two_hundred_faults_on_the_fake_tree_always_end_ready(
    fakes: dict[int, tuple[subprocess.Popen[str], Path]],
) -> None:
    for seed, (process, out) in fakes.items():
        output = process.communicate()[0]
        assert process.returncode == 0, f"seed {seed}: {output[-3000:]}"
        report = json.loads(out.read_text())
        assert report["summary"]["rounds"] == 40
        assert report["summary"]["struck"] > 25, "the storm must hit something"
        assert report["end"] == {"exit_code": 0, "left": []}
        cost = report["rounds"][-1]["cost"]
        assert cost["fds"] <= report["first_cost"]["fds"] + 8, "file descriptors leak"
        assert cost["rss"] <= report["first_cost"]["rss"] + 30e6, "memory leaks"
