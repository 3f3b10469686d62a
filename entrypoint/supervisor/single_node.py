"""What the supervisor asks of its group, answered for the one host that needs nobody: the base of head and follower."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from ..config.settings import Loaded
from ..engine.run import Run
from ..healing import machine
from .diagnosis import Diagnosis, FailedRun
from .launch import Launch, Prepared

if TYPE_CHECKING:
    from ..plan import Change

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Refusal:
    """Why a node, or the group, gave up."""

    cause: str
    reason: str
    next_step: str
    exit_code: int


class SingleNode:
    """One host. ``follows``: another node decides, and serves the clients. ``endpoint``: what `POST /group` of the
    control port does, None without a group."""

    follows = False
    endpoint: Endpoint | None = None

    def __init__(self, launch: Launch, diagnosis: Diagnosis) -> None:
        self.launch, self.diagnosis = launch, diagnosis

    async def link(self) -> machine.Event:
        """Stay in touch for the life of the supervisor; returns when that cannot go on."""
        return await asyncio.Event().wait()  # type: ignore[return-value]

    def preparing(self) -> None:
        """A start is being prepared."""

    async def plan(self, prepared: Prepared, changes: tuple[Change, ...]) -> Prepared:
        """The plan in force and the command; in a group when all nodes are ready for it. Raises Stop."""
        return await self.launch.plan(prepared, changes)

    def spawned(self, run: Run) -> None:
        """The engine of this node runs."""

    async def watch(self, run: Run) -> machine.Event:
        """Return when the run has to end for the group's sake."""
        return await asyncio.Event().wait()  # type: ignore[return-value]

    def quiet(self) -> float:
        """Seconds since another node's engine showed progress."""
        return float("inf")

    def ready(self) -> None:
        """READY is reached."""

    def mark_failing(self) -> None:
        """The engine of this node is being killed."""

    def leaving(self) -> None:
        """A stop was asked for."""

    async def parting(self) -> None:
        """Before the engine is killed: what others should know first, if a stop was asked for."""

    async def diagnose(self, failed: FailedRun, loaded: Loaded) -> machine.Diagnosed:
        """Why the run ended and what follows."""
        return await self.diagnosis.examine(failed, loaded)

    def recovering(self) -> None:
        """The old engine is gone and understood."""

    def gave_up(self, refusal: Refusal) -> None:
        """This node's machine gave up."""

    async def farewell(self) -> None:
        """Before the exit: let those who depend on us know."""
