"""A verdict of doctor, and how a table of judgements becomes the list of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from .host_report import HostReport

CheckVerdict = Literal["pass", "warn", "fail", "unknown"]


@dataclass(frozen=True)
class Judgement:
    """What one look at a host leads to. ``fix``: the command or the setting that mends it."""

    verdict: CheckVerdict
    detail: str
    fix: str | None = None


@dataclass(frozen=True)
class Check:
    """One verdict as the doctor document shows it."""

    id: str
    title: str
    verdict: CheckVerdict
    detail: str
    fix: str | None = None

    def document(self) -> dict[str, str | None]:
        """The check as JSON takes it."""
        return dict(vars(self))


# id, title, judge
CheckTable = tuple[tuple[str, str, Callable[[HostReport], Judgement]], ...]


def checks_of(table: CheckTable, host: HostReport) -> list[Check]:
    """One check for each row of ``table``."""
    return [check(id, title, judge(host)) for id, title, judge in table]


def check(id: str, title: str, judgement: Judgement) -> Check:
    """``judgement`` under its name."""
    return Check(id, title, judgement.verdict, judgement.detail, judgement.fix)


def good(detail: str) -> Judgement:
    """Nothing to mend."""
    return Judgement("pass", detail)


def warn(detail: str, fix: str) -> Judgement:
    """Serving works, but slower or less safely."""
    return Judgement("warn", detail, fix)


def fail(detail: str, fix: str) -> Judgement:
    """Serving will not work, or not for long."""
    return Judgement("fail", detail, fix)


def unknown(detail: str, fix: str | None = None) -> Judgement:
    """It could not be read; ``fix`` says how an operator may look."""
    return Judgement("unknown", detail, fix)


def listed(values: Iterable[object], separator: str = ", ") -> str:
    """Values side by side, as texts for people have them."""
    return separator.join(map(str, values))
