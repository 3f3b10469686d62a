"""Which of several nodes' ends came first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .classify import Verdict

# What a rank says of the fall of another: where something else is seen within this many seconds, that came first.
ECHOES = frozenset({"nccl_error", "nccl_init_hang", "hang_serving", "hang_startup", "node_lost", "unknown", "none"})
ECHO_SECONDS = 5.0


@dataclass(frozen=True)
class Candidate:
    """One node's end: ``at`` in the head's monotonic seconds, ``own`` False when it only followed the group;
    ``verdict`` is then that of the reason why it did."""

    node: int
    at: float
    own: bool
    verdict: Verdict


def first(candidates: Sequence[Candidate]) -> Candidate | None:
    """The end that the others follow from; None when every node only followed (a node or the link was lost)."""
    ours = sorted((c for c in candidates if c.own), key=lambda c: (c.at, c.node))
    if not ours:
        return None
    earliest = ours[0]
    if _is_echo(earliest):
        for other in ours[1:]:
            if other.at - earliest.at <= ECHO_SECONDS and not _is_echo(other):
                return other
        lost = [c for c in candidates if not c.own and c.verdict.cause == "node_lost" and c.at < earliest.at]
        return min(lost, key=lambda c: c.at, default=earliest)  # it ended for want of a node, and that was felt here
    return earliest


def _is_echo(candidate: Candidate) -> bool:
    return candidate.verdict.cause in ECHOES and not candidate.verdict.outside
