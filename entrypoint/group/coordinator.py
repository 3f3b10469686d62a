"""The head's ledger: who was heard when, which epoch is on, and what each worker is to do. Pure: time and reports come
in, answers go out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..plan import Plan
from ..supervisor.node import Refusal
from .messages import Answer, End, Outcome, Report


class Rejected(Exception):
    """This worker cannot be one of the group; the text says why."""


@dataclass(frozen=True)
class Member:
    """A worker as last heard, ``heard`` in the head's monotonic seconds."""

    report: Report
    heard: float

    @property
    def name(self) -> str:
        return f"node {self.report.rank} ({self.report.host})"

    def quiet(self, now: float) -> float:
        """Seconds since its engine showed progress."""
        return self.report.quiet + now - self.heard


@dataclass(frozen=True)
class HeardEnd:
    """``at``: the first sign of the end in the head's monotonic seconds."""

    member: Member
    end: End
    at: float


_PLANNED = Outcome("none", "a planned restart of the group", "", 0, retry=True)
# What a worker hears whose end belongs to no epoch that this head knows: of an earlier life of the head.
_FORGOTTEN = Outcome("none", "the head's supervisor started anew", "", 0, retry=True)

# Why a node is not waited with yet. Who gave up by itself is heard in `refused`.
_DOING = {
    "preparing": "is preparing",
    "running": "is ending its engine",
    "ended": "is ending its engine",
    "gave_up": "gave up with an earlier head: start it again",
}


@dataclass
class Coordinator:
    """``lease``: seconds without a word after which a node is lost. An epoch runs from `begin` to `end`; `conclude`
    says what follows from it."""

    nnodes: int
    lease: float
    life: str
    members: dict[int, Member] = field(default_factory=dict)
    refusal: Refusal | None = None
    ready: bool = False
    running: bool = False
    quiet: float = 0.0  # of the head's own engine
    told: set[int] = field(default_factory=set)  # who knows that the epoch, or the group, is over
    ends: dict[int, HeardEnd] = field(default_factory=dict)
    _number: int = 0
    _plan: Plan | None = None
    _cast: dict[int, str] = field(default_factory=dict)  # rank -> life of those who were there at the beginning
    _alive: dict[int, float] = field(default_factory=dict)  # rank -> when that life was last heard
    _outcomes: dict[str, Outcome] = field(default_factory=dict)
    _superseded: set[str] = field(default_factory=set)
    _sent: set[int] = field(default_factory=set)  # who was told to start and has not said more since

    @property
    def epoch(self) -> str:
        return f"{self.life}:{self._number}"

    @property
    def ranks(self) -> range:
        """The workers'."""
        return range(1, self.nnodes)

    # -- what the head does ------------------------------------------------------------------------------------

    def begin(self, plan: Plan) -> None:
        """All nodes spawn."""
        self._number += 1
        self._plan, self.running, self.ready = plan, True, False
        self._cast = {rank: self.members[rank].report.life for rank in self.ranks}
        self._alive = {rank: self.members[rank].heard for rank in self.ranks}
        self.ends, self.told, self._sent = {}, set(), set()

    def end(self) -> None:
        """All nodes end their engines."""
        self.running = self.ready = False

    def conclude(self, outcome: Outcome) -> None:
        """What follows from the epoch that ended."""
        self._outcomes = {self.epoch: outcome}

    def conclude_planned(self) -> None:
        """The epoch's end was asked for, if nothing else was concluded of it."""
        self._outcomes.setdefault(self.epoch, _PLANNED)

    def give_up(self, refusal: Refusal) -> None:
        self.end()
        self.refusal, self.told = refusal, set()

    # -- what the head asks ------------------------------------------------------------------------------------

    def missing(self, identity: Mapping[str, str], now: float) -> tuple[str, ...]:
        """Whom the next epoch still waits for, in words. Raises Rejected when the group cannot be one."""
        waits = []
        for rank in self.ranks:
            member = self.members.get(rank)
            if member is None:
                waits.append(f"node {rank} has not been heard yet")
            elif member.report.standing == "leaving":
                waits.append(f"{member.name} has left")
            elif now - member.heard > self.lease:
                waits.append(f"{member.name} is no longer heard")
            elif rank in self._sent:  # it may well run what it was told to start
                waits.append(f"{member.name} has not said yet that its engine ended")
            elif member.report.standing != "waiting":
                waits.append(f"{member.name} {_DOING[member.report.standing]}")
            else:
                for key, mine in identity.items():
                    theirs = member.report.identity.get(key)
                    if theirs != mine:
                        raise Rejected(f"{member.name} has {key} {theirs}, node 0 has {mine}")
        return tuple(waits)

    def refused(self) -> tuple[Member, Refusal] | None:
        """A worker that gave up by itself."""
        for member in self.members.values():
            if member.report.standing == "gave_up" and member.report.refusal is not None:
                return member, member.report.refusal
        return None

    def leaving(self) -> str | None:
        """Who of this epoch is being stopped by its operator, in words."""
        for rank in self._cast:
            if self.members[rank].report.standing == "leaving":
                return f"{self.members[rank].name} is being stopped"
        return None

    def lost(self, now: float) -> str | None:
        """Why the epoch that is on cannot go on, in words; None while it can."""
        if not self.running:
            return None
        for rank, life in self._cast.items():
            member = self.members[rank]
            if member.report.life != life:
                return f"the supervisor of {member.name} started anew"
            if now - member.heard > self.lease:
                return f"{member.name} is no longer heard"
            if member.report.standing == "gave_up":
                return f"{member.name} gave up"
            if rank in self.ends:
                return f"the engine of {member.name} ended"
        return None

    def owing(self, now: float) -> list[int]:
        """Who of the epoch can still be expected to say how its engine ended."""
        return [
            rank
            for rank, life in self._cast.items()
            if rank not in self.ends
            and (member := self.members[rank]).report.life == life
            and now - member.heard <= self.lease
            and (rank in self._sent or (member.report.epoch == self.epoch and member.report.standing == "running"))
        ]

    def vanished(self, now: float) -> dict[int, tuple[float, str]]:
        """Who of the epoch went without a word on how its engine ended: when it was last heard, and in words."""
        gone = {}
        for rank, life in self._cast.items():
            member, at = self.members[rank], self._alive[rank]
            if rank not in self.ends and (member.report.life != life or now - at > min(self.lease, 5)):
                anew = f"the supervisor of {member.name} started anew"
                gone[rank] = (at, anew if member.report.life != life else f"{member.name} is no longer heard")
        return gone

    def untold(self, now: float) -> list[int]:
        """Who hears us and does not know yet that it is over."""
        cast = self.members if self.refusal is not None else self._cast
        return [rank for rank in cast if rank not in self.told and now - self.members[rank].heard <= min(self.lease, 5)]

    # -- what the head answers ---------------------------------------------------------------------------------

    def hear(self, report: Report, now: float) -> Answer:
        """Take a report in; say what its node is to do. Raises Rejected."""
        if report.rank not in self.ranks:
            raise Rejected(f"node rank {report.rank} is none of this group's workers (1 to {self.nnodes - 1})")
        if report.life in self._superseded:
            newer = self.members[report.rank].report.host
            raise Rejected(f"another supervisor ({newer}) reports as node {report.rank}")
        before = self.members.get(report.rank)
        if before is not None and before.report.life != report.life:
            self._superseded.add(before.report.life)
        member = Member(report, now)
        self.members[report.rank] = member
        if self._cast.get(report.rank) == report.life:
            self._alive[report.rank] = now
        ours = report.epoch == self.epoch
        if report.end is not None and ours and report.rank not in self.ends:
            self.ends[report.rank] = HeardEnd(member, report.end, now - report.end.age)
        return self._answer(report, ours, now)

    def _answer(self, report: Report, ours: bool, now: float) -> Answer:
        if self.refusal is not None:
            self.told.add(report.rank)
            return Answer("over", refusal=self.refusal)
        quiet = min([self.quiet, *(m.quiet(now) for rank, m in self.members.items() if rank != report.rank)])
        standing = report.standing
        if standing == "running":
            self._sent.discard(report.rank)
            if ours and self.running:
                return Answer("run", self.epoch, self.ready, quiet)
            if ours:
                self.told.add(report.rank)
            return Answer("end", report.epoch, words="the head ended this run of the group")
        if standing == "ended":
            self.told.add(report.rank)
            outcome = self._outcomes.get(str(report.epoch), None if ours else _FORGOTTEN)
            return Answer("wait", report.epoch, outcome=outcome)
        if standing == "waiting" and self.running and self._cast.get(report.rank) == report.life and not ours:
            self._sent.add(report.rank)
            return Answer("start", self.epoch, False, quiet, plan=self._plan)
        self._sent.discard(report.rank)
        if not self.running:
            self.told.add(report.rank)
        waits = [f"node {r}" for r in self.ranks if r != report.rank and not self._is_waiting(r, now)]
        return Answer("wait", self.epoch, self.ready, quiet, words=", ".join(waits))

    def _is_waiting(self, rank: int, now: float) -> bool:
        member = self.members.get(rank)
        return member is not None and now - member.heard <= self.lease and member.report.standing == "waiting"
