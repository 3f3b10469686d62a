"""A search with real supervisors and a fake engine: killed in the middle, past an arm that dies, to a winner."""

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

from entrypoint.supervisor.planning import plan_document

# The engine is a fake, but the model comes with the real one's lock.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
SCRIPT = str(Path(__file__).with_name("fake_tune.py"))
DYING, NONSENSE, FAST = (
    f"FAKE_ENGINE={json.dumps(plan, separators=(',', ':'))}"
    for plan in ({"exit_early": 1}, {"speed": 9, "embedding": [0.8, -0.6]}, {"speed": 2})
)


def of_state(state: Path) -> list[str]:
    """The processes of this state directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if f"RELAUNCH_STATE_DIR={state}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.append(" ".join(process.cmdline()))
        except (OSError, psutil.Error):
            continue
    return found


def attempts(state: Path) -> dict[str, Any]:
    for journal in (state / "tune").glob("*.json"):
        return dict(json.loads(journal.read_text()))
    return {}


def test_a_search_survives_a_kill_and_an_arm_that_dies_and_the_next_start_has_the_winner(tmp_path: Path) -> None:
    state = tmp_path / "state"
    environ = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "RELAUNCH_PRESET": "rehearsal",
        "RELAUNCH_STATE_DIR": str(state),
        "RELAUNCH_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [sys.executable, SCRIPT, DYING, NONSENSE, FAST]
    first = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while DYING not in attempts(state).get("attempts", {}):  # the untuned plan was measured
            assert first.poll() is None
            time.sleep(0.2)
    finally:
        first.kill()
        first.wait()
    while of_state(state):  # all of it dies with the search
        time.sleep(0.2)

    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "going on after" in done.stderr
    found = json.loads(done.stdout)
    why = {arm["name"]: arm["why"] for arm in found["arms"]}
    assert why["untuned"] is None and why[FAST] is None
    assert why[DYING].split(":")[0].isidentifier(), "a cause of the catalogue"
    assert why[NONSENSE] == "nonsense: vectors moved: cosine 0.000 to those of the untuned plan"
    assert found["winner"] == FAST and found["kept"]
    assert of_state(state) == []

    document, _ = plan_document(environ)
    assert [row["source"] for row in document["decisions"] if row["setting"] == "FAKE_ENGINE"] == ["tuned"]
    assert document["engine"]["env"]["FAKE_ENGINE"] == FAST.partition("=")[2]
