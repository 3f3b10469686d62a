"""Where in the engine an exception comes from, and what that means when its text says nothing. Pure, and data.

The area of a traceback is that of its innermost frame in the engine; a message that comes without its traceback is
looked up in `catalogue/sites.txt`. What the engine only warns of is in `catalogue/warnings.txt`: sglang's log names no
level. `scripts/raise_sites.py` derives both from the pinned engine's source.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_DIRECTORY = Path(__file__).parent / "catalogue"
_WORD = re.compile(r"\w+")
KEY_WORDS = 2  # of a message's begin, by which it is found
_ENGINE = re.compile(r"(?:sglang|vllm|flashinfer|sgl_kernel|deep_gemm|deep_ep|tensorrt_llm)/|(?:^|\.\.\./)\w+/\w+\.py")


@dataclass(frozen=True)
class Area:
    """A part of the engine. ``cause``: a cause, or a key of `Catalogue.by_stage`; ``why``: the reason."""

    cause: str
    where: re.Pattern[str]
    why: str


@cache
def areas() -> tuple[Area, ...]:
    """The areas, in the order in which they are tried."""
    rows = tomllib.loads((_DIRECTORY / "areas.toml").read_text(encoding="utf-8"))["area"]
    return tuple(Area(row["cause"], re.compile(row["where"], re.MULTILINE), row["why"]) for row in rows)


def area_of(frame: str) -> Area | None:
    """The area of one frame ("path in function"), None for one outside the engine."""
    return next((area for area in areas() if area.where.search(frame)), None)


def innermost(frames: str) -> Area | None:
    """The area of the innermost frame that lies in the engine."""
    for frame in reversed(frames.split("\n")):
        if frame and _ENGINE.search(frame):
            area = area_of(frame)
            if area is not None:
                return area
    return None


@cache
def _table(name: str) -> Mapping[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """First words of a message -> (message in lower case, heading that it stands under) of a table of messages."""
    found: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    heading = ""
    for line in (_DIRECTORY / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            heading = line[2:]
            continue
        text = line.lower()
        found.setdefault(tuple(_WORD.findall(text)[:KEY_WORDS]), []).append((text, heading))
    return {key: tuple(rows) for key, rows in found.items()}


def _look_up(message: str, name: str) -> str | None:
    """The heading of the longest message of a table that is in ``message``, None when there is none."""
    text = " ".join(message.lower().split())
    words = _WORD.findall(text)
    table = _table(name)
    best: tuple[int, str] | None = None
    for at in range(len(words) - KEY_WORDS + 1):
        for fragment, heading in table.get(tuple(words[at : at + KEY_WORDS]), ()):
            if fragment in text and (best is None or len(fragment) > best[0]):
                best = len(fragment), heading
    return best[1] if best else None


def site_of(message: str) -> str | None:
    """The cause (or key of `by_stage`) of the area that raises ``message``, None for a message that the engine's
    source does not have, or has in many areas."""
    return _look_up(message, "sites.txt")


def is_warned(message: str) -> bool:
    """Whether the pinned engine logs ``message`` below the level of an error, and never raises it: it goes on."""
    return _look_up(message, "warnings.txt") is not None
