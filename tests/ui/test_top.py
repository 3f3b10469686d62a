"""The screen of `relaunch top` and what `relaunch connect` prints, from a control port with made-up numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from entrypoint.ui import connect
from entrypoint.ui.top_screen import screen, spark

sys.path.insert(0, str(Path(__file__).parents[1] / "control"))
import control_fakes as fakes

from entrypoint.control.connect import Connection, document
from entrypoint.control.snapshot import snapshot
from entrypoint.control.status import Status


def shown(status: Status, gpus: int = 8, columns: int = 100, rows: int = 50) -> list[str]:
    found = snapshot(status, fakes.ready_history(), fakes.nvml(gpus).latest())
    return screen(found, columns, rows, color=False)


def test_a_busy_box_on_one_screen() -> None:
    lines = shown(fakes.ready())
    text = "\n".join(lines)
    assert lines[0].startswith("relaunch  serving, 1h06m")
    for part in ("first token", "p50 311 ms  p95 700 ms", "61% of prompt tokens", "of 487,000 tokens", "410/600 W"):
        assert part in text
    assert "sw_power_cap" in next(line for line in lines if line.startswith("5 "))
    assert "oom_prefill" in lines[-1]
    assert max(len(line) for line in lines) <= 100
    assert len(lines) <= 30


def test_a_small_terminal_gets_no_line_too_many() -> None:
    lines = shown(fakes.ready(), columns=40, rows=10)
    assert len(lines) == 10
    assert max(map(len, lines)) <= 40


def test_a_start_has_its_bar_and_a_give_up_its_next_step() -> None:
    assert "49%" in shown(fakes.starting())[1] or "48%" in shown(fakes.starting())[1]
    lines = shown(fakes.gave_up(), 0)
    assert "fell off the bus" in lines[1]
    assert lines[2].startswith("next: reset the GPU")


def test_before_anything_is_known_and_when_nobody_answers() -> None:
    assert shown(Status(), 0)[0].startswith("relaunch  preparing the weights")
    (line,) = screen(None, 30, 10, color=False)
    assert line == "no news from the supervisor; t"


def test_lines_of_eighths() -> None:
    assert spark([0.0, None, 4.0, 8.0], 10) == "▁ ▅█"
    assert spark([0.0, 0.0], 1) == "▁"


def run(*words: str, port: str, token: str = "") -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RELAUNCH_")}
    environ = {**kept, "RELAUNCH_CONTROL_PORT": port, "RELAUNCH_CONTROL_TOKEN": token}
    command = [sys.executable, "-P", "-m", "entrypoint", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_the_verb_prints_one_screen_off_a_terminal_and_sends_the_token() -> None:
    with fakes.served(fakes.ready(), fakes.ready_history(), token="s3cret-token", gpus=fakes.nvml()) as address:
        port = address.rpartition(":")[2]
        done = run("top", port=port, token="s3cret-token")
        assert (done.returncode, done.stderr) == (0, "")
        assert "61% of prompt tokens" in done.stdout
        assert "\x1b" not in done.stdout
        refused = run("top", port=port)
        assert refused.returncode == 69
        assert "set RELAUNCH_CONTROL_TOKEN" in refused.stderr
    gone = run("connect", port=port)
    assert gone.returncode == 69
    assert "start ./relaunch serve" in gone.stderr


def test_connect_names_the_clients_and_finds_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    text = connect.overview(document(Connection("http://box:30000", "m", 4096, key=True, embedding=False)))
    assert "4,096 tokens" in text
    assert "relaunch connect claude-code" in text
    assert "$MODEL_API_KEY" in text
