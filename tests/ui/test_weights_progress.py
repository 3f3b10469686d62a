"""What `relaunch weights fetch`, `verify` and `repair` show while they work."""

from __future__ import annotations

import io

from entrypoint.ui import weights_progress
from entrypoint.units import GIB
from entrypoint.weights.progress import TransferProgress

HALF = TransferProgress("download", 200 * GIB, 400 * GIB, 40, 83, 1.25 * GIB)


def test_a_line_has_bytes_files_rate_and_time_left() -> None:
    assert weights_progress.line(HALF) == (
        "downloading 200.00 GiB of 400.00 GiB (50%), 40 of 83 files, 1.25 GiB/s, 2m40s left"
    )
    assert weights_progress.line(TransferProgress("resolve")) == "asking the hub"
    waiting = TransferProgress("download", 0, GIB, 0, 3, 0.0, "waiting 30s: the hub limits requests")
    assert weights_progress.line(waiting).endswith("0 of 3 files, waiting 30s: the hub limits requests")


def test_a_log_gets_a_line_every_ten_seconds_and_one_for_each_phase_and_wait() -> None:
    now, lines = [0.0], list[str]()
    reporter = weights_progress.LineReporter(lines.append, lambda: now[0])
    for second in range(26):
        now[0] = float(second)
        reporter(HALF)
    assert len(lines) == 3
    reporter(TransferProgress("verify", 1, 2, 0, 1))
    reporter(TransferProgress("verify", 1, 2, 0, 1, 0.0, "waiting"))
    reporter(TransferProgress("verify", 1, 2, 0, 1, 0.0, "waiting"))
    assert len(lines) == 5


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_a_file_gets_lines() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        with weights_progress.reporting(stream) as report:
            report(HALF)
    assert "\x1b[" in terminal.getvalue() and "downloading 200.00 GiB" in terminal.getvalue()
    assert file.getvalue().startswith("relaunch: downloading") and "\x1b" not in file.getvalue()
