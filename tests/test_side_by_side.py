"""The script that measures the goals beside the engine alone: its arms, its table, what it ends."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks/side_by_side.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("side_by_side", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["side_by_side"] = module
    spec.loader.exec_module(module)
    return module


def test_both_sides_get_the_same_flags(script: ModuleType, tmp_path: Path) -> None:
    own, _ = script.command("engine", tmp_path, (1, 2), "--load-format dummy", tmp_path)
    ours, environment = script.command("latency", tmp_path, (1, 2), "--load-format dummy", tmp_path)
    assert own[-2:] == ["--load-format", "dummy"] == environment["RELAUNCH_ENGINE_ARGS"].split()
    assert environment["RELAUNCH_GOAL"] == "latency" and ours[-1] == "serve"


def row(speed: float, first: float) -> dict[str, float]:
    return {"out_per_second": speed, "first_token": first, "per_token": 0.01}


def test_the_table_has_medians_and_shares_where_more_is_better(script: ModuleType) -> None:
    results = {
        "m": {
            "engine": {"0": {"chat": row(100, 2)}, "1": {"chat": row(300, 2)}, "2": {"chat": row(200, 2)}},
            "balanced": {"0": {"chat": row(220, 1)}},
        }
    }
    text = script.report(results, ["chat"])
    assert "| m, chat | tokens/s | 200.0 | 220.0 (1.10x) |" in text
    assert "first token, s | 2.0 | 1.0 (2.00x) |" in text
    assert "balanced: worst cell 1.00x, geometric mean 1.301x; the bar holds." in text
    results["m"]["balanced"]["0"]["chat"] = row(190, 1)
    assert "worst cell 0.95x" in script.report(results, ["chat"]) and "does not hold" in script.report(
        results, ["chat"]
    )


def test_what_is_there_is_not_measured_again(script: ModuleType, tmp_path: Path) -> None:
    kept = tmp_path / "results.json"
    kept.write_text('{"llama-8b": {"engine": {"0": {"one": {"out_per_second": 5}}}}}')
    words = ["--out", str(tmp_path), "--models", "llama-8b", "--arms", "engine", "--loads", "one", "--rounds", "1"]
    done = subprocess.run([sys.executable, "-P", str(SCRIPT), *words], capture_output=True, text=True, check=True)
    assert "| llama-8b, one | tokens/s | 5.0 |" in done.stdout and not (tmp_path / "work").exists()


def test_what_was_started_is_ended_with_its_children(script: ModuleType) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"1\n"
        child = psutil.Process(process.pid).children()[0]
        script.end(process)
        assert process.poll() is not None
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
