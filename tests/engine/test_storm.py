"""The storm of benchmarks/storm.py, small: 200 rounds on the fake tree, five on the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from supervisor import ROOT

STORM = str(ROOT / "benchmarks" / "storm.py")


def storm(out: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", STORM, "--out", str(out), *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.timeout(1200)
def test_two_hundred_faults_on_the_fake_tree_always_end_ready(tmp_path: Path) -> None:
    seeds = range(5)
    storms = [storm(tmp_path / f"{seed}.json", "--fake", "--rounds", "40", "--seed", str(seed)) for seed in seeds]
    outputs = [process.communicate()[0] for process in storms]
    for seed, process, output in zip(seeds, storms, outputs, strict=True):
        assert process.returncode == 0, f"seed {seed}: {output[-3000:]}"
        report = json.loads((tmp_path / f"{seed}.json").read_text())
        assert report["summary"]["rounds"] == 40
        assert report["summary"]["struck"] > 25, "the storm must hit something"
        assert report["end"] == {"exit_code": 0, "left": []}
        cost = report["rounds"][-1]["cost"]
        assert cost["fds"] <= report["first_cost"]["fds"] + 8, "file descriptors leak"
        assert cost["rss"] <= report["first_cost"]["rss"] + 30e6, "memory leaks"


@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_five_faults_on_the_real_engine_always_end_ready(tmp_path: Path) -> None:
    # Draws loading, recovering, warmup, distributed and ready; scheduler, detokenizer and main; two of them stopped.
    process = storm(tmp_path / "real.json", "--rounds", "5", "--seed", "993")
    output = process.communicate()[0]
    assert process.returncode == 0, output[-3000:]
    report = json.loads((tmp_path / "real.json").read_text())
    assert report["summary"]["struck"] == 5
    assert report["end"] == {"exit_code": 0, "left": []}
