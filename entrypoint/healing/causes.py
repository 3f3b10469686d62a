"""The failure catalogue (`catalogue/*.toml`) as objects: causes, and the meanings of texts that show them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .prefilter import required_literals

_DIRECTORY = Path(__file__).parent / "catalogue"
# Of two meanings that fit one line equally well, the one of the earlier file counts.
MEANING_FILES = ("memory", "kernels", "running", "machine", "weights", "asked", "places")
_TERM = re.compile(r"\{([a-z_]+)\}")


class Expression:
    """A regular expression that is only tried on texts with one of the literals that it needs."""

    def __init__(self, text: str) -> None:
        self.pattern = re.compile(text)
        literals = required_literals(text)
        # The longest first: they are the rarest.
        self._literals = sorted(literals, key=len, reverse=True) if literals else None

    def search(self, text: str) -> bool:
        """Whether the expression is anywhere in ``text``, which is in lower case."""
        if self._literals is not None:
            for literal in self._literals:
                if literal in text:
                    break
            else:
                return False
        return self.pattern.search(text) is not None


class Message:
    """A text in lower case that remembers which expressions it contains: meanings share their terms."""

    def __init__(self, text: str) -> None:
        self.text = text.lower()
        self._known: dict[Expression, bool] = {}

    def has(self, expression: Expression) -> bool:
        """Whether ``expression`` is anywhere in the text."""
        known = self._known.get(expression)
        if known is None:
            known = self._known[expression] = expression.search(self.text)
        return known


@dataclass(frozen=True)
class Cause:
    """One name of the closed list. ``stage``: where it happens when the log does not say."""

    name: str
    action: str
    stage: str
    summary: str
    next_step: str


@dataclass(frozen=True)
class Clause:
    """Expressions that must all be in a message, and expressions that must not be."""

    present: tuple[Expression, ...]
    absent: tuple[Expression, ...]

    def holds(self, message: Message) -> bool:
        """Whether ``message`` says this."""
        return all(map(message.has, self.present)) and not any(map(message.has, self.absent))


@dataclass(frozen=True)
class Meaning:
    """What shows a cause; the head of `catalogue/causes.toml` explains the fields. ``cause`` is a cause's name or a key
    of ``Catalogue.by_stage``."""

    cause: str
    weight: int
    says: tuple[Clause, ...]
    unless: Expression | None
    stages: frozenset[str]
    frames: re.Pattern[str] | None
    stage: str | None
    next_step: str | None

    @classmethod
    def bare(cls, cause: str, weight: int, next_step: str | None = None) -> Meaning:
        """A meaning that is shown by something else than terms."""
        return cls(cause, weight, (), None, frozenset(), None, None, next_step)

    def fits(self, message: Message, frames: str, stage: str | None) -> bool:
        """Whether a message with these ``frames`` above it, in this ``stage``, means the cause."""
        if self.stages and stage and stage not in self.stages:
            return False
        if not any(clause.holds(message) for clause in self.says):
            return False
        if self.unless is not None and message.has(self.unless):
            return False
        return self.frames is None or self.frames.search(frames) is not None


@dataclass(frozen=True)
class Catalogue:
    """Everything that ships in `catalogue/`.

    ``by_stage``: pseudo-cause -> stage -> cause, with the key ``default``; ``frames`` and ``marks``: expressions that
    tell the stage from a traceback, and from the stage lines of other engines; ``subject``: expressions of
    `lifecycle.toml`; ``xids``: Xid number -> what NVIDIA says has to be done.
    """

    causes: Mapping[str, Cause]
    meanings: tuple[Meaning, ...]
    by_stage: Mapping[str, Mapping[str, str]]
    frames: tuple[tuple[str, re.Pattern[str]], ...]
    marks: tuple[tuple[str, re.Pattern[str]], ...]
    subject: Mapping[str, re.Pattern[str]]
    xids: Mapping[int, str]
    xid_next: Mapping[str, str]

    def resolve(self, cause: str, stage: str | None) -> str:
        """The cause that a meaning's ``cause`` stands for at ``stage``."""
        table = self.by_stage.get(cause)
        return cause if table is None else table.get(stage or "default", table["default"])


@cache
def catalogue() -> Catalogue:
    """The catalogue that ships with the package; read once."""
    data, lifecycle, xids = _read("causes"), _read("lifecycle"), _read("xids")
    terms = _read("terms")["terms"]
    causes = {
        name: Cause(name, row["action"], row["stage"], row["summary"], row["next"])
        for name, row in data["cause"].items()
    }
    return Catalogue(
        causes,
        tuple(_meaning(row, terms) for name in MEANING_FILES for row in _read(name)["meaning"]),
        data["by_stage"],
        tuple((row["stage"], re.compile(row["re"], re.IGNORECASE)) for row in lifecycle["frame"]),
        tuple((row["stage"], re.compile(row["re"], re.IGNORECASE)) for row in lifecycle["mark"]),
        {name: re.compile(text, re.IGNORECASE) for name, text in lifecycle["subject"].items()},
        {number: kind for kind, numbers in xids["xid"].items() for number in numbers},
        xids["next"],
    )


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((_DIRECTORY / f"{name}.toml").read_text(encoding="utf-8"))


def _meaning(row: Mapping[str, Any], terms: Mapping[str, str]) -> Meaning:
    return Meaning(
        cause=row["cause"],
        weight=row["weight"],
        says=tuple(_clause(text, terms) for text in row["says"]),
        unless=_compile(row["unless"], terms) if "unless" in row else None,
        stages=frozenset(row.get("stages", ())),
        frames=re.compile(row["frames"], re.IGNORECASE | re.MULTILINE) if "frames" in row else None,
        stage=row.get("stage"),
        next_step=row.get("next"),
    )


def _clause(text: str, terms: Mapping[str, str]) -> Clause:
    first, *others = text.split(" + ")
    present = [first, *(part for part in others if not part.startswith("-"))]
    absent = [part[1:] for part in others if part.startswith("-")]
    return Clause(tuple(_compile(part, terms) for part in present), tuple(_compile(part, terms) for part in absent))


@cache
def _compiled(text: str) -> Expression:
    return Expression(text)


def _compile(text: str, terms: Mapping[str, str]) -> Expression:
    return _compiled(_TERM.sub(lambda match: f"(?:{terms[match[1]]})", text))
