"""The live header, on a small terminal emulator: where text lands, what scrolls, what is left behind."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

import pytest

from entrypoint.control.status import Status
from entrypoint.ui import terminal

sys.path.insert(0, str(Path(__file__).parents[1] / "control"))
import control_fakes as fakes

ROWS, COLUMNS = 12, 80
_ESCAPE = re.compile(r"\x1b(?:\[(\d*)(?:;(\d*))?([a-zA-Z])|([78]))")


class Screen(io.StringIO):
    """Enough of a VT100 for what the header uses: absolute moves, erase line, save, restore, scrolling region."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = [""] * ROWS
        self.row, self.column, self.saved, self.region = 0, 0, (0, 0), (0, ROWS - 1)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        position = 0
        while position < len(text):
            match = _ESCAPE.match(text, position)
            if match:
                self._escape(*match.groups())
                position = match.end()
                continue
            assert text[position] != "\x1b", f"unknown escape {text[position : position + 8]!r}"
            self._put(text[position])
            position += 1
        return len(text)

    def _escape(self, first: str | None, second: str | None, final: str | None, short: str | None) -> None:
        if short == "7":
            self.saved = (self.row, self.column)
        elif short == "8":
            self.row, self.column = self.saved
        elif final == "H":
            self.row, self.column = int(first or 1) - 1, int(second or 1) - 1
        elif final == "K":
            self.lines[self.row] = ""
        elif final == "r":
            self.region = (int(first or 1) - 1, int(second or ROWS) - 1)
            self.row = self.column = 0
        else:
            assert final == "m", final

    def _put(self, character: str) -> None:
        if character == "\n":
            self.column = 0
            top, bottom = self.region
            if self.row == bottom:
                del self.lines[top]
                self.lines.insert(bottom, "")
            else:
                self.row = min(self.row + 1, ROWS - 1)
            return
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
        self.column += 1


def shown(status: Status, screen: Screen) -> terminal.Header:
    header = terminal.Header(status, screen, color=True, size=lambda: os.terminal_size((COLUMNS, ROWS)))
    header.draw()
    return header


def test_the_header_stays_while_the_log_scrolls_below() -> None:
    screen = Screen()
    screen.write("$ relaunch serve\n")
    status = fakes.starting()
    header = shown(status, screen)
    for n in range(30):
        screen.write(f"line {n}\n")
        header.draw()
    assert screen.lines[0].startswith("relaunch starting the engine: capturing graphs, 2m3")
    assert screen.lines[0].rstrip().endswith("nvidia/GLM-5-NVFP4")
    assert re.match(r"█+░+ 48%  about 2m4\ds left  graphs 9/21", screen.lines[1])
    assert screen.lines[2] == "─" * COLUMNS
    assert screen.lines[3:11] == [f"line {n}" for n in range(22, 30)]
    status.phase, status.stage = "READY", None
    header.draw()
    assert screen.lines[0].startswith("relaunch serving, ")


def test_it_writes_nothing_while_nothing_changes() -> None:
    screen = Screen()
    status = fakes.gave_up()
    status.phase_since -= 7200  # shown in minutes by now
    header = shown(status, screen)
    before = list(screen.lines)
    writes: list[str] = []
    screen.write = lambda text: writes.append(text) or 0  # type: ignore[method-assign, func-returns-value]
    header.draw()
    assert writes == []
    assert "gpu_lost: GPU 3 fell off the bus" in before[1]


def test_the_screen_is_given_back() -> None:
    screen = Screen()
    header = shown(fakes.ready(), screen)
    screen.write("last words\n")
    header.stop()
    assert screen.region == (0, ROWS - 1)
    screen.write("$ ")
    assert screen.lines[ROWS - 1] == "$ "
    assert "last words" in screen.lines


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("status", [Status(), fakes.starting(), fakes.ready(), fakes.gave_up()])
def test_lines_fit_and_no_color_is_obeyed(columns: int, status: Status) -> None:
    plain = terminal.lines(status, columns, color=False)
    assert all(len(line) <= columns for line in plain), plain
    assert "\x1b" not in "".join(plain)
    assert "\x1b[" in "".join(terminal.lines(status, columns, color=True))


@pytest.mark.parametrize(
    ("stream", "log_format", "term", "wanted"),
    [
        (Screen(), "text", "xterm", True),
        (Screen(), "json", "xterm", False),
        (Screen(), "text", "dumb", False),
        (io.StringIO(), "text", "xterm", False),
    ],
)
def test_only_a_real_terminal_gets_one(stream: io.StringIO, log_format: str, term: str, wanted: bool) -> None:
    assert terminal.wanted(stream, log_format, {"TERM": term}) is wanted
