"""Which part this host has in a group."""

from __future__ import annotations

from collections.abc import Callable

from ..diagnosis import Diagnosis
from ..healing import machine
from ..launch import Launch
from ..settings import Loaded
from ..watching import Alarm
from . import address
from .alone import Alone


def make(
    loaded: Loaded,
    launch: Launch,
    diagnosis: Diagnosis,
    post: Callable[[machine.Event], None],
    on_alarm: Callable[[Alarm], None],
    on_wait: Callable[[str | None], None],
) -> Alone:
    """``post`` takes events for the state machine; ``on_alarm`` hears why a run is about to be ended; ``on_wait`` what
    a start waits for, None when it no longer does. Raises Stop (78) for settings with which no group can form."""
    address.require(loaded.settings)
    if loaded.settings.nnodes == 1:
        return Alone(launch, diagnosis)
    if loaded.settings.node_rank == 0:
        from .head import Head

        return Head(launch, diagnosis, loaded, on_alarm, on_wait)
    from .follower import Follower

    return Follower(launch, diagnosis, loaded, post, on_alarm, on_wait)
