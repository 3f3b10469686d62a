"""Lines that were wrapped at a fixed width, whole again. Pure."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator

SAMPLE = 2_000  # lines that are looked at to find the width
NARROWEST, WIDEST = 60, 250  # columns of a terminal
FEWEST = 3  # lines of exactly the width of the terminal
SHARE = 0.05  # of all lines
BROKEN = 0.6  # share of those lines after which the next one does not look like a beginning
_BEGINS = re.compile(
    r"\[\d{4}-|\[\w+\]: |\d{4}-\d\d-\d\d|[A-Z][a-z]{2} [ \d]\d \d\d:|(INFO|WARNING|ERROR)[ :]|Traceback|  File \""
    r"|\(\w+ pid="
)


def unwrapped(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Every line with its number (from 1); a line that fills the terminal's width is joined with the next one, if the
    log was wrapped at all."""
    feed = iter(lines)
    sample = list(itertools.islice(feed, SAMPLE))
    width = _width(sample)
    numbered = enumerate(itertools.chain(sample, feed), 1)
    if width is None:
        yield from numbered
        return
    start, held = 0, ""
    for number, line in numbered:
        if held and _BEGINS.match(line):
            yield start, held
            held = ""
        start = start if held else number
        held += line
        if len(line) != width or len(held) > 100 * width:
            yield start, held
            held = ""
    if held:
        yield start, held


def _width(sample: list[str]) -> int | None:
    """The width at which a terminal broke the lines, None when no terminal did."""
    counts = Counter(len(line) for line in sample if line)
    if not counts:
        return None
    widest = max(counts)
    if not NARROWEST <= widest <= WIDEST or counts[widest] < max(FEWEST, SHARE * len(sample)):
        return None
    full = [at for at, line in enumerate(sample[:-1]) if len(line) == widest]
    broken = sum(not _BEGINS.match(sample[at + 1]) for at in full)
    return widest if broken >= BROKEN * len(full) > 0 else None
