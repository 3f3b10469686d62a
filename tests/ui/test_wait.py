"""`relaunch wait`: says where the start stands, and ends with the start: ready, given up, or nobody there."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from entrypoint.config import loading
from entrypoint.errors import Stop
from entrypoint.state.files import utc
from entrypoint.state.post_mortems import PostMortems
from entrypoint.ui import progress_line, wait
from entrypoint.ui.progress_line import ProgressLine

STARTING = {"phase": "STARTING", "ready": False, "stage": "loading", "percent": 40.2, "estimate_seconds": 31.0}
PREPARING = {
    "phase": "PREPARING",
    "ready": False,
    "stage": "download",
    "progress": {"bytes": 1 << 30, "bytes_total": 4 << 30},
    "elapsed_seconds": 65.0,
}
READY = {"phase": "READY", "ready": True}
NOBODY = Stop("not_running", "nobody", exit_code=69)


class Clock:
    """Seconds that pass in sleeps alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def waited(answers: list[Any], installing: list[str | None] | None = None) -> tuple[str, float]:
    """What was shown off a terminal, and how long it took. Each answer is given once, the last one for ever."""
    clock, shown = Clock(), io.StringIO()
    says = iter(installing or ())

    def ask() -> Any:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    wait.wait(ask, lambda: next(says, None), lambda: NOBODY, ProgressLine(shown, clock), clock, clock.sleep)
    return shown.getvalue(), clock.now


def test_each_phase_is_shown_as_it_begins_and_then_now_and_then() -> None:
    text, _ = waited([PREPARING] * 40 + [STARTING] * 2 + [READY])
    lines = text.splitlines()
    assert lines[0] == "relaunch: preparing the weights: fetching, 1.00 GiB of 4.00 GiB, 1m05s so far"
    assert lines[-1] == "relaunch: starting the engine: loading the weights, 40%, about 31s left"
    assert len(lines) == 1 + 40 // int(progress_line.EVERY) + 1


def test_an_installation_is_waited_for_as_long_as_it_takes() -> None:
    text, seconds = waited([None] * 600 + [READY], ["downloading: 1.0 of 4.3 GB"] * 600)
    assert text.startswith("relaunch: downloading: 1.0 of 4.3 GB\n") and seconds == 600 * wait.EVERY


def test_it_ends_when_nobody_is_there() -> None:
    with pytest.raises(Stop) as caught:
        waited([None])
    assert caught.value is NOBODY


def test_a_supervisor_that_is_started_again_within_the_grace_is_waited_for() -> None:
    waited([STARTING, *[None] * int(wait.GRACE), STARTING, *[None] * int(wait.GRACE), READY])


def test_one_that_holds_after_giving_up_ends_it_with_the_reason() -> None:
    with pytest.raises(Stop) as caught:
        waited([STARTING, {"phase": "GAVE_UP", "ready": False, "reason": "gpu_lost: GPU 3 is gone; reset it"}])
    assert caught.value.exit_code == 70 and "gpu_lost: GPU 3 is gone; reset it" in caught.value.line()


def test_the_last_words_of_one_that_exited_are_its_post_mortem(tmp_path: Path) -> None:
    environ = {"RELAUNCH_STATE_DIR": str(tmp_path), "RELAUNCH_MODEL": "x"}
    settings = loading.load(environ).settings
    kept = PostMortems(tmp_path)
    body = {"action": "stop_operator", "evidence": [], "changed": [], "gave_up": True, "summary": "the bus is empty"}
    kept.write(1000.0, "gpu_lost", body)
    stop = wait.last_words(settings, "http://x", 999.0)
    assert (stop.cause, stop.exit_code) == ("gpu_lost", 70) and "the bus is empty" in stop.line()
    earlier = wait.last_words(settings, "http://x", 1001.0)
    assert earlier.exit_code == 69 and "http://x" in earlier.line()
    assert utc(1000.0) in kept.read()[0]["at"]


def test_on_a_terminal_one_line_changes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((20, 24)))
    clock = Clock()
    shown = ProgressLine(terminal := Terminal(), clock)
    shown.line("begins")
    for text in ("a line that is longer than the terminal", "short"):
        clock.sleep(1.0)
        shown.progress(text)
        shown.progress("too soon to be drawn")
    shown.end()
    assert terminal.getvalue() == "\r\x1b[Kbegins\n\r\x1b[Ka line that is long\r\x1b[Kshort\r\x1b[K"


@pytest.fixture
def supervisor() -> Iterator[tuple[int, dict[str, Any]]]:
    """A control port that answers with what the test puts into its dictionary."""
    answers: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers[self.path]).encode()
            self.send_response(200 if answers["/readyz"]["ready"] else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server.server_port, answers
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_verb_asks_the_control_port_of_the_settings(supervisor: tuple[int, dict[str, Any]]) -> None:
    port, answers = supervisor
    answers["/readyz"] = READY
    command = [sys.executable, "-P", "-m", "entrypoint", "wait"]
    environ = {**os.environ, "RELAUNCH_CONTROL_PORT": str(port), "RELAUNCH_CONTROL_HOST": "0.0.0.0"}
    environ |= {"RELAUNCH_CONTROL_TOKEN": "t" * 40, "http_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "relaunch: ready: http://127.0.0.1:30000\n")
    answers["/readyz"] = {"ready": False, "phase": "GAVE_UP", "reason": "disk_full: nothing left"}
    answers["/startupz"] = {"phase": "GAVE_UP"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (70, "relaunch: it gave up: disk_full: nothing left\n")


def test_nobody_there_is_said_with_the_next_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        environ = {"RELAUNCH_CONTROL_PORT": str(taken.getsockname()[1]), "RELAUNCH_STATE_DIR": str(tmp_path)}
        monkeypatch.setattr(wait, "GRACE", 0.0)
        monkeypatch.setattr(wait, "EVERY", 0.01)
        # The default of `sleep` is bound already; a second is all that it costs.
        monkeypatch.setattr("time.sleep", lambda _: None)
        with pytest.raises(Stop) as caught:
            wait.run(environ, None)
    assert caught.value.exit_code == 69 and "./relaunch serve" in caught.value.next_step
