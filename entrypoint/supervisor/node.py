"""The interface between the supervisor and the group of nodes that serve one model together.

The base class is the implementation for a single host. `entrypoint/group` has the two others: `GroupHead` (node 0,
which decides for all) and `GroupWorker` (every other node, which follows the head).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from ..config.settings import Loaded
from ..engine.run import Run
from ..healing import events
from ..plan import Change
from .diagnosis import Conclusion, Diagnosis
from .evidence import FailedRun
from .launch import Launch, PlannedLaunch, PreparedLaunch
from .monitors import Alarm

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Refusal:
    """Why a node, or the whole group, gave up. The fields are those of `errors.Stop`."""

    cause: str
    reason: str
    next_step: str
    exit_code: int


@dataclass(frozen=True)
class NodeContext:
    """What the supervisor gives a node to work with.

    ``post`` puts an event into the state machine's queue. ``on_alarm`` reports why the engine is about to be ended.
    ``on_wait`` publishes what a start waits for on another node; None says that it no longer waits.
    """

    loaded: Loaded
    launch: Launch
    diagnosis: Diagnosis
    post: Callable[[events.Event], None]
    on_alarm: Callable[[Alarm], None]
    on_wait: Callable[[str | None], None]


class Node:
    """This host's part in serving one model.

    All methods are called on the supervisor's event loop. Those named ``on_...`` are notifications: they return at
    once and do not raise. The coroutines say what they wait for; each may be cancelled at any of its awaits.

    ``is_worker``: True when another node decides about restarts and serves the clients. ``endpoint``: the handler of
    `POST /group` on the control port, None where there is no group or this node is not its head.
    """

    is_worker = False
    endpoint: Endpoint | None = None

    def __init__(self, context: NodeContext) -> None:
        self.launch, self.diagnosis = context.launch, context.diagnosis

    async def link(self) -> None:
        """Stay in touch with the other nodes. Started once; runs until it is cancelled when the supervisor exits."""
        await asyncio.Event().wait()

    def on_preparing(self) -> None:
        """The supervisor began to prepare a start; no engine runs."""

    async def plan(self, prepared: PreparedLaunch, changes: tuple[Change, ...]) -> PlannedLaunch:
        """Return ``prepared`` with the plan and the engine's command.

        In a group it waits, without a limit, until all nodes are ready to start together. The plan returned may be
        infeasible. Raises Stop when the group cannot be formed or has given up.
        """
        return await self.launch.plan(prepared, changes)

    def on_spawn(self, run: Run) -> None:
        """The engine of this node was spawned as ``run``."""

    async def watch(self, run: Run) -> events.Event:
        """Wait until ``run`` must end because of another node and return the event that ends it.

        Called twice in a run: from the spawn to READY, then from READY on. Never returns on a single host.
        """
        return await asyncio.Event().wait()  # type: ignore[return-value]

    def seconds_since_peer_progress(self) -> float:
        """Seconds since the engine of another node last showed progress; infinite on a single host."""
        return float("inf")

    def on_ready(self) -> None:
        """The engine of this node serves (phase READY)."""

    def on_stop_requested(self) -> None:
        """The operator asked this supervisor to stop."""

    async def before_kill(self) -> None:
        """Called before the engine's processes are killed, for whatever reason.

        Waits at most a second: until the head knows that a worker is being stopped by its operator, so that the end
        of its engine is not taken for a failure.
        """

    async def diagnose(self, failed: FailedRun, loaded: Loaded) -> Conclusion:
        """Return why the run ended and what follows. A head waits for what the workers saw (at most 45 s), a worker
        for the head's conclusion (without a limit)."""
        return await self.diagnosis.diagnose(failed, loaded)

    def on_recovering(self) -> None:
        """The old engine is gone and its end is understood; recovery begins."""

    def on_gave_up(self, refusal: Refusal) -> None:
        """The state machine of this node gave up."""

    async def on_exit(self) -> None:
        """Called once before the supervisor exits. Waits a few seconds at most until the other nodes know."""


MakeNode = Callable[[NodeContext], Node]
