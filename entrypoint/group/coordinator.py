"""What the head knows of its workers, and what each of them is to do. Pure: time and reports come in, replies go out.

A common attempt of all nodes to run the engine is an epoch. Times are the head's monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..plan import Plan
from ..supervisor.node import Refusal
from .messages import End, Outcome, Reply, Report


class IncompatibleWorker(Exception):
    """This worker cannot be one of the group; the text says why."""


@dataclass(frozen=True)
class GroupMember:
    """The last report of a worker and the time ``heard`` when it came."""

    report: Report
    heard: float

    @property
    def name(self) -> str:
        """The node as messages name it."""
        return f"node {self.report.rank} ({self.report.host})"

    def idle_seconds(self, now: float) -> float:
        """Seconds since its engine showed progress."""
        return self.report.idle_seconds + now - self.heard


@dataclass(frozen=True)
class ReportedEnd:
    """How the engine of ``member`` ended. ``at``: the time of the first sign of it."""

    member: GroupMember
    end: End
    at: float


_PLANNED = Outcome("none", "a planned restart of the group", "", 0, retry=True)
# The reply to an end of an epoch that this head does not know: one of an earlier instance.
_FORGOTTEN = Outcome("none", "the head's supervisor started anew", "", 0, retry=True)

# Why a worker is not ready. One that gave up by itself is found by `refused`.
_STATE_LABELS = {
    "preparing": "is preparing",
    "running": "is ending its engine",
    "ended": "is ending its engine",
    "gave_up": "gave up with an earlier head: start it again",
}


@dataclass
class Coordinator:
    """State of the group. An epoch runs from `begin` to `end`; `conclude` says what follows from it.

    ``lease``: seconds without a report after which a node is lost. ``instance_id``: unique to the head's supervisor.
    ``acknowledged``: ranks that know that the epoch, or the group, is over. ``idle_seconds``: since the head's own
    engine showed progress.
    """

    nnodes: int
    lease: float
    instance_id: str
    members: dict[int, GroupMember] = field(default_factory=dict)
    refusal: Refusal | None = None
    ready: bool = False
    running: bool = False
    idle_seconds: float = 0.0
    acknowledged: set[int] = field(default_factory=set)
    ends: dict[int, ReportedEnd] = field(default_factory=dict)
    _number: int = 0
    _plan: Plan | None = None
    _participants: dict[int, str] = field(default_factory=dict)  # rank -> supervisor instance at the start
    _last_heard: dict[int, float] = field(default_factory=dict)  # rank -> when that instance was last heard
    _outcomes: dict[str, Outcome] = field(default_factory=dict)
    _superseded: set[str] = field(default_factory=set)
    _starting: set[int] = field(default_factory=set)  # told to start, and no later report yet

    @property
    def epoch(self) -> str:
        """Identifies the epoch that is on or was last."""
        return f"{self.instance_id}:{self._number}"

    @property
    def ranks(self) -> range:
        """The ranks of the workers."""
        return range(1, self.nnodes)

    # -- commands of the head ----------------------------------------------------------------------------------

    def begin(self, plan: Plan) -> None:
        """Start an epoch: every worker is told to spawn with ``plan``."""
        self._number += 1
        self._plan, self.running, self.ready = plan, True, False
        self._participants = {rank: self.members[rank].report.instance_id for rank in self.ranks}
        self._last_heard = {rank: self.members[rank].heard for rank in self.ranks}
        self.ends, self.acknowledged, self._starting = {}, set(), set()

    def end(self) -> None:
        """End the epoch: every worker is told to end its engine."""
        self.running = self.ready = False

    def conclude(self, outcome: Outcome) -> None:
        """Tell the workers what follows from the epoch that ended."""
        self._outcomes = {self.epoch: outcome}

    def conclude_planned(self) -> None:
        """Conclude that the end of the epoch was asked for, unless something else was concluded."""
        self._outcomes.setdefault(self.epoch, _PLANNED)

    def give_up(self, refusal: Refusal) -> None:
        """End the epoch for good: every worker is told ``refusal``."""
        self.end()
        self.refusal, self.acknowledged = refusal, set()

    def shift(self, gap: float) -> None:
        """Leave out ``gap`` seconds in which the head itself stood still: it heard nobody because it did not run."""
        self.members = {rank: replace(member, heard=member.heard + gap) for rank, member in self.members.items()}
        self._last_heard = {rank: at + gap for rank, at in self._last_heard.items()}

    # -- queries of the head -----------------------------------------------------------------------------------

    def not_ready(self, identity: Mapping[str, str], now: float) -> tuple[str, ...]:
        """Return one message per worker that is not ready to start. Raises IncompatibleWorker for one whose identity
        differs from the head's."""
        waits = []
        for rank in self.ranks:
            member = self.members.get(rank)
            if member is None:
                waits.append(f"node {rank} has not been heard yet")
            elif member.report.state == "leaving":
                waits.append(f"{member.name} has left")
            elif now - member.heard > self.lease:
                waits.append(f"{member.name} is no longer heard")
            elif rank in self._starting:  # it may well run what it was told to start
                waits.append(f"{member.name} has not said yet that its engine ended")
            elif member.report.state != "waiting":
                waits.append(f"{member.name} {_STATE_LABELS[member.report.state]}")
            else:
                for key, mine in identity.items():
                    theirs = member.report.identity.get(key)
                    if theirs != mine:
                        raise IncompatibleWorker(f"{member.name} has {key} {theirs}, node 0 has {mine}")
        return tuple(waits)

    def refused(self) -> tuple[GroupMember, Refusal] | None:
        """Return a worker that gave up by itself and why, or None."""
        for member in self.members.values():
            if member.report.state == "gave_up" and member.report.refusal is not None:
                return member, member.report.refusal
        return None

    def leaving(self) -> str | None:
        """Return a message naming a participant that its operator is stopping, or None."""
        for rank in self._participants:
            if self.members[rank].report.state == "leaving":
                return f"{self.members[rank].name} is being stopped"
        return None

    def end_reason(self, now: float) -> str | None:
        """Return why the epoch cannot go on, or None while it can."""
        if not self.running:
            return None
        for rank, instance_id in self._participants.items():
            member = self.members[rank]
            if member.report.instance_id != instance_id:
                return f"the supervisor of {member.name} started anew"
            if now - member.heard > self.lease:
                return f"{member.name} is no longer heard"
            if member.report.state == "gave_up":
                return f"{member.name} gave up"
            if rank in self.ends:
                return f"the engine of {member.name} ended"
        return None

    def pending_reports(self, now: float) -> list[int]:
        """Return the participants that can still be expected to report how their engine ended."""
        return [
            rank
            for rank, instance_id in self._participants.items()
            if rank not in self.ends
            and (member := self.members[rank]).report.instance_id == instance_id
            and now - member.heard <= self.lease
            and (rank in self._starting or (member.report.epoch == self.epoch and member.report.state == "running"))
        ]

    def lost_workers(self, now: float) -> dict[int, tuple[float, str]]:
        """Return the participants that went without reporting an end: rank -> (last heard, message)."""
        gone = {}
        for rank, instance_id in self._participants.items():
            member, at = self.members[rank], self._last_heard[rank]
            if rank not in self.ends and (member.report.instance_id != instance_id or now - at > min(self.lease, 5)):
                anew = f"the supervisor of {member.name} started anew"
                gone[rank] = (
                    at,
                    anew if member.report.instance_id != instance_id else f"{member.name} is no longer heard",
                )
        return gone

    def unacknowledged(self, now: float) -> list[int]:
        """Return the ranks that are still heard and do not know yet that it is over."""
        participants = self.members if self.refusal is not None else self._participants
        return [
            rank
            for rank in participants
            if rank not in self.acknowledged and now - self.members[rank].heard <= min(self.lease, 5)
        ]

    # -- replies to workers ------------------------------------------------------------------------------------

    def hear(self, report: Report, now: float) -> Reply:
        """Take a report and return what its node is to do. Raises IncompatibleWorker."""
        if report.rank not in self.ranks:
            raise IncompatibleWorker(
                f"node rank {report.rank} is none of this group's workers (1 to {self.nnodes - 1})"
            )
        if report.instance_id in self._superseded:
            newer = self.members[report.rank].report.host
            raise IncompatibleWorker(f"another supervisor ({newer}) reports as node {report.rank}")
        before = self.members.get(report.rank)
        if before is not None and before.report.instance_id != report.instance_id:
            self._superseded.add(before.report.instance_id)
        member = GroupMember(report, now)
        self.members[report.rank] = member
        if self._participants.get(report.rank) == report.instance_id:
            self._last_heard[report.rank] = now
        ours = report.epoch == self.epoch
        if report.end is not None and ours and report.rank not in self.ends:
            self.ends[report.rank] = ReportedEnd(member, report.end, now - report.end.age)
        return self._reply(report, ours, now)

    def _reply(self, report: Report, ours: bool, now: float) -> Reply:
        if self.refusal is not None:
            self.acknowledged.add(report.rank)
            return Reply("over", refusal=self.refusal)
        idle_seconds = min(
            [self.idle_seconds, *(m.idle_seconds(now) for rank, m in self.members.items() if rank != report.rank)]
        )
        state = report.state
        if state == "running":
            self._starting.discard(report.rank)
            if ours and self.running:
                return Reply("run", self.epoch, self.ready, idle_seconds)
            if ours:
                self.acknowledged.add(report.rank)
            return Reply("end", report.epoch, message="the head ended this run of the group")
        if state == "ended":
            self.acknowledged.add(report.rank)
            outcome = self._outcomes.get(str(report.epoch), None if ours else _FORGOTTEN)
            return Reply("wait", report.epoch, outcome=outcome)
        if (
            state == "waiting"
            and self.running
            and self._participants.get(report.rank) == report.instance_id
            and not ours
        ):
            self._starting.add(report.rank)
            return Reply("start", self.epoch, False, idle_seconds, plan=self._plan)
        self._starting.discard(report.rank)
        if not self.running:
            self.acknowledged.add(report.rank)
        waits = [f"node {r}" for r in self.ranks if r != report.rank and not self._is_waiting(r, now)]
        return Reply("wait", self.epoch, self.ready, idle_seconds, message=", ".join(waits))

    def _is_waiting(self, rank: int, now: float) -> bool:
        member = self.members.get(rank)
        return member is not None and now - member.heard <= self.lease and member.report.state == "waiting"
