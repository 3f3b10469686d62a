"""Which part this host has in a group."""

from __future__ import annotations

from collections.abc import Callable

from ..config.settings import Loaded
from ..healing import machine
from ..supervisor.diagnosis import Diagnosis
from ..supervisor.launch import Launch
from ..supervisor.monitors import Alarm
from ..supervisor.single_node import SingleNode
from . import address


def make(
    loaded: Loaded,
    launch: Launch,
    diagnosis: Diagnosis,
    post: Callable[[machine.Event], None],
    on_alarm: Callable[[Alarm], None],
    on_wait: Callable[[str | None], None],
) -> SingleNode:
    """``post`` takes events for the state machine; ``on_alarm`` hears why a run is about to be ended; ``on_wait`` what
    a start waits for, None when it no longer does. Raises Stop (78) for settings with which no group can form."""
    address.require(loaded.settings)
    if loaded.settings.nnodes == 1:
        return SingleNode(launch, diagnosis)
    if loaded.settings.node_rank == 0:
        from .head import Head

        return Head(launch, diagnosis, loaded, on_alarm, on_wait)
    from .worker import Worker

    return Worker(launch, diagnosis, loaded, post, on_alarm, on_wait)
