"""`relaunch check` and `bench` against the real engine on the CPU: one that generates, one that embeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from supervisor import Supervisor

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
KEY = "sentinel-api-key"


def ask(supervisor: Supervisor, *words: str) -> dict[str, Any]:
    environ = {
        **os.environ,
        "RELAUNCH_STATE_DIR": str(supervisor.state),
        "RELAUNCH_PORT": str(supervisor.port),
        "RELAUNCH_CONTROL_PORT": str(supervisor.control),
        "RELAUNCH_API_KEY": KEY,
    }
    command = [sys.executable, "-P", "-m", "entrypoint", *words, "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert KEY not in done.stdout
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("preset", "applying", "figure"),
    [
        ("rehearsal-generate", {"models", "key", "chat", "streaming", "messages", "long"}, "output_tokens_per_second"),
        ("rehearsal", {"models", "key", "embeddings"}, "prompt_tokens_per_second"),
    ],
)
def test_what_a_rehearsal_serves_passes_the_check_and_is_measured(
    tmp_path: Path, preset: str, applying: set[str], figure: str
) -> None:
    supervisor = Supervisor(tmp_path, PRESET=preset, API_KEY=KEY)
    try:
        supervisor.until_ready()
        document = ask(supervisor, "check")
        assert {item["id"] for item in document["check"]["items"] if item["verdict"] == "pass"} == applying
        document = ask(supervisor, "bench", "--load", "16/8", "--concurrency", "1,2", "--seconds", "1")
        levels = document["bench"]["levels"]
        assert [level["concurrency"] for level in levels] == [1, 2]
        for level in levels:
            assert level["errors"] == 0 and level[figure] > 0
        assert document["plan"]["flags"] and len(list((supervisor.state / "receipts").iterdir())) == 2
    finally:
        supervisor.close()


def test_a_tune_that_is_killed_goes_on_and_survives_an_arm_that_dies(tmp_path: Path) -> None:
    state = tmp_path / "state"
    environ = {
        **os.environ,
        "RELAUNCH_PRESET": "rehearsal-generate",
        "RELAUNCH_STATE_DIR": str(state),
        "RELAUNCH_CACHE_DIR": str(tmp_path / "cache"),
    }
    arms = ["--arm=--chat-template=/nowhere.jinja", "--only"]
    command = [sys.executable, "-P", "-m", "entrypoint", "tune", "--goal", "latency", "--load", "8/4", "--budget", "1s"]

    def started() -> int:
        boots = state / "boots.jsonl"
        return boots.read_text().count('"ready_at": null') if boots.exists() else 0

    with open(tmp_path / "first.log", "wb") as log:
        first = subprocess.Popen([*command, *arms], env=environ, stdout=log, stderr=log)
        try:
            while started() < 2:  # the untuned plan was measured, and an arm's engine was spawned
                assert first.poll() is None, (tmp_path / "first.log").read_text()
                time.sleep(0.2)
        finally:
            first.kill()
            first.wait()
    done = subprocess.run([*command, *arms, "--json"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "going on after" in done.stderr
    found = json.loads(done.stdout)["tune"]
    untuned, dead = found["arms"]
    assert untuned["score"] > 0
    assert dead["score"] is None and ":" in dead["why"]
    left = [p.pid for p in psutil.process_iter() if f"RELAUNCH_STATE_DIR={state}".encode() in environ_of(p.pid)]
    assert left == []


def environ_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
