"""The failure catalogue (`catalogue/*.toml`) as objects: causes with their actions, and the rules that name them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .prefilter import required_literals


@dataclass(frozen=True)
class Cause:
    """One name of the closed list. ``stage``: where it happens when the log does not say."""

    name: str
    action: str
    stage: str
    summary: str
    next_step: str


@dataclass(frozen=True)
class Rule:
    """Texts that show a cause, each with the words that it needs (`prefilter.py`).

    ``cause`` is a cause's name or a key of ``Catalogue.by_stage``; ``stages``: it only counts there (empty:
    anywhere); ``frames``: the traceback above must name this; ``stage``: overrides the stage that was reached;
    ``site``: the innermost frames above must name this; ``next_step``: advice that this evidence calls for,
    instead of the cause's own.
    See the head of `catalogue/causes.toml` for ``weight``.
    """

    cause: str
    weight: int
    texts: tuple[tuple[frozenset[str] | None, re.Pattern[str]], ...]
    unless: re.Pattern[str] | None
    stages: frozenset[str]
    frames: re.Pattern[str] | None
    stage: str | None
    next_step: str = ""
    site: re.Pattern[str] | None = None

    def search(self, text: str, lowered: str) -> re.Match[str] | None:
        """The first text that shows the cause; ``lowered`` is ``text`` in lower case."""
        for words, pattern in self.texts:
            if words is None or any(word in lowered for word in words):
                match = pattern.search(text)
                if match:
                    return None if self.unless and self.unless.search(text) else match
        return None


@dataclass(frozen=True)
class Catalogue:
    """``by_stage``: pseudo-cause -> stage -> cause, with the key ``default``; ``frames`` and ``marks``: expressions
    that tell the stage from a traceback, and from the stage lines of other engines."""

    causes: Mapping[str, Cause]
    rules: tuple[Rule, ...]
    by_stage: Mapping[str, Mapping[str, str]]
    frames: tuple[tuple[str, re.Pattern[str]], ...]
    marks: tuple[tuple[str, re.Pattern[str]], ...]

    def resolve(self, cause: str, stage: str | None) -> str:
        """The cause that a rule's ``cause`` means at ``stage``."""
        table = self.by_stage.get(cause)
        return cause if table is None else table.get(stage or "default", table["default"])


# Of two rules that fit one line equally well, the one of the earlier file counts.
_RULES = ("memory", "kernels", "running", "places", "asked")


@dataclass(frozen=True)
class XidClass:
    """Xid numbers that call for one thing. ``name``: reset, reboot or ignored; ``next_step``: that thing, in words."""

    name: str
    numbers: frozenset[int]
    next_step: str

    def rule(self) -> Rule:
        """The rule for the kernel's line about such an Xid."""
        numbers = "|".join(map(str, sorted(self.numbers)))
        ignored = self.name == "ignored"
        pattern = rf"xid ?\([^)]*\): ?(?:{numbers})\b|\bxid(?: error| code)?[ :=#]{{1,3}}(?:{numbers})\b"
        texts = ((required_literals(pattern), _compile(pattern)),)
        weight = 88 if ignored else 98
        return Rule("none" if ignored else "gpu_lost", weight, texts, None, frozenset(), None, None, self.next_step)


@cache
def xid_classes() -> tuple[XidClass, ...]:
    """NVIDIA's table of Xid numbers, by what they call for."""
    return tuple(XidClass(name, frozenset(row["numbers"]), row["next"]) for name, row in _read("xids").items())


@cache
def catalogue() -> Catalogue:
    """The catalogue that ships with the package; read once."""
    data = _read("causes") | _read("stages")
    sites = _read("sites")
    rules = [row for name in _RULES for row in _read(name)["rule"]]
    causes = {
        name: Cause(name, row["action"], row["stage"], row["summary"], row["next"])
        for name, row in data["cause"].items()
    }
    return Catalogue(
        causes,
        (
            *(kind.rule() for kind in xid_classes()),
            *(_rule(row) for row in rules),
            *(_site_rule(row) for row in sites["site"]),
        ),
        data["by_stage"] | sites["by_stage"],
        tuple((row["stage"], _compile(row["re"])) for row in data["frame"]),
        tuple((row["stage"], _compile(row["re"])) for row in data["mark"]),
    )


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "catalogue" / f"{name}.toml").read_text(encoding="utf-8"))


def _rule(row: Mapping[str, Any]) -> Rule:
    return Rule(
        cause=row["cause"],
        weight=row["weight"],
        texts=tuple((required_literals(part), _compile(part)) for part in row["re"]),
        unless=_compile(row["not"]) if "not" in row else None,
        stages=frozenset(row.get("in", ())),
        frames=_compile(row["frames"]) if "frames" in row else None,
        stage=row.get("stage"),
        next_step=row.get("next", ""),
    )


# An exception's own line; its place decides only where its text says nothing (see the weights of `asked.toml`).
_EXCEPTION = (
    r"^(?:\w+\.)*\w*(?:error|exception|unavailable|rejected|mismatch|request|timeout|redirects|skipsample)\b(?::|$)"
)
_SITE_WEIGHT = 35


def _site_rule(row: Mapping[str, Any]) -> Rule:
    texts = ((None, _compile(_EXCEPTION)),)
    return Rule(row["cause"], _SITE_WEIGHT, texts, None, frozenset(), None, None, site=_compile(row["re"]))


def _compile(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)
