"""`relaunch top`: one screen of what the supervisor and its engine do now, drawn anew every two seconds."""

from __future__ import annotations

import contextlib
import select
import shutil
import sys
import termios
import tty
from collections.abc import Iterator, Mapping
from typing import TextIO

from ..config import loading
from ..errors import EXIT_OK, Stop
from . import running
from .top_screen import Document, screen

# Seconds between two screens: the engine is asked every five, the GPUs every two.
EVERY = 2.0
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def run(environ: Mapping[str, str], *, once: bool) -> int:
    """Draw until `q` or Ctrl-C; once where ``once`` or off a terminal. Returns 0. Raises Stop (69) when no supervisor
    runs with the settings of ``environ``."""
    out = sys.stdout
    with running.client(loading.load(environ).settings) as http:
        document: Document | None = running.ask(http, "/status")
        size = shutil.get_terminal_size()
        if once or not out.isatty():
            out.write("\n".join(screen(document, size.columns, 1000, color=out.isatty())) + "\n")
            return EXIT_OK
        with _full_screen(out), contextlib.suppress(KeyboardInterrupt):
            while True:
                size = shutil.get_terminal_size()
                drawn = screen(document, size.columns, size.lines, color="NO_COLOR" not in environ)
                # Each line over the old one, the rest cleared: no flicker.
                out.write("\x1b[H" + "".join(f"{line}\x1b[K\r\n" for line in drawn[:-1]) + f"{drawn[-1]}\x1b[K\x1b[J")
                out.flush()
                if _quit(EVERY):
                    break
                try:
                    document = running.ask(http, "/status")
                except Stop:
                    document = None
    return EXIT_OK


@contextlib.contextmanager
def _full_screen(out: TextIO) -> Iterator[None]:
    """The alternate screen, with keys read one by one; afterwards everything as it was."""
    before = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    out.write(_ENTER)
    try:
        if before is not None:
            tty.setcbreak(sys.stdin)
        yield
    finally:
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        out.write(_LEAVE)
        out.flush()


def _quit(seconds: float) -> bool:
    """Wait; True when `q` was pressed meanwhile."""
    keys = [sys.stdin] if sys.stdin.isatty() else []
    ready, _, _ = select.select(keys, [], [], seconds)
    return bool(ready) and sys.stdin.read(1) in ("q", "Q", "")
