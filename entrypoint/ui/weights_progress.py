"""Progress of `relaunch weights` on stderr: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from ..units import format_bytes, format_duration
from ..weights.progress import OnProgress, TransferProgress

LINE_SECONDS = 10.0
VERBS = {"resolve": "asking the hub", "download": "downloading", "verify": "verifying", "repair": "repairing"}


def line(progress: TransferProgress) -> str:
    """Return a report as one line: phase, bytes, files, rate, time left, and what it waits for."""
    parts = [VERBS[progress.phase]]
    if progress.bytes_total:
        share = 100 * progress.bytes // progress.bytes_total
        done, total = format_bytes(progress.bytes), format_bytes(progress.bytes_total)
        parts[0] += f" {done} of {total} ({share}%)"
        parts.append(f"{progress.files} of {progress.files_total} files")
    if progress.rate > 0:
        parts.append(f"{format_bytes(int(progress.rate))}/s")
    left = progress.remaining_seconds
    if left:
        parts.append(f"{format_duration(left)} left")
    if progress.note:
        parts.append(progress.note)
    return ", ".join(parts)


class LineReporter:
    """Writes a line at each new phase or wait, and at most every LINE_SECONDS between them."""

    def __init__(self, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._said: tuple[str, str] | None = None
        self._at = 0.0

    def __call__(self, progress: TransferProgress) -> None:
        """Take one report."""
        now, what = self._clock(), (progress.phase, progress.note)
        if what != self._said or now - self._at >= LINE_SECONDS:
            self._said, self._at = what, now
            self._write(line(progress))


@contextmanager
def reporting(stream: TextIO | None = None) -> Iterator[OnProgress]:
    """Yield the function that shows reports on ``stream`` (stderr)."""
    out = sys.stderr if stream is None else stream
    if not out.isatty():
        yield LineReporter(lambda text: print(f"relaunch: {text}", file=out, flush=True))
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    with Bar(TextColumn("{task.description}"), BarColumn(), console=Console(file=out), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(progress: TransferProgress) -> None:
            bar.update(task, description=line(progress), completed=progress.bytes, total=progress.bytes_total or None)

        yield show
