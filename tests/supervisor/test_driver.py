"""What the driver does for the machine, with collaborators in place of the engine's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from entrypoint.config import loading
from entrypoint.config.settings import Loaded
from entrypoint.control.status import Status
from entrypoint.errors import Stop
from entrypoint.healing import events, machine
from entrypoint.healing.events import Action, Do
from entrypoint.supervisor.diagnosis import Conclusion
from entrypoint.supervisor.driver import Driver
from entrypoint.supervisor.node import Node
from entrypoint.supervisor.recovery import Recovery

STATE = machine.State(machine.Limits(), run=1)


class SilentLog:
    """Takes lines and keeps none."""

    def debug(self, text: str) -> None:
        pass

    info = warning = error = debug


class Rig:
    """A driver whose events land in ``posted``. ``recover`` stands in for the real recovery."""

    def __init__(self, loaded: Loaded, recover: Any = None, make_node: Any = Node) -> None:
        self.posted: asyncio.Queue[events.Event] = asyncio.Queue()
        log, none = cast(Any, SilentLog()), cast(Any, None)
        self.driver = Driver(
            loaded, {}, log, Status(), self.posted.put_nowait, print, make_node, launch=none, recover=recover
        )
        self.driver._planned = none

    async def does(self, *actions: Action) -> events.Event:
        self.driver.perform(STATE, actions)
        return await asyncio.wait_for(self.posted.get(), 5)


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    return loading.load({"RELAUNCH_MODEL": "org/name", "RELAUNCH_STATE_DIR": str(tmp_path)})


async def test_a_planned_restart_does_not_repair_again(loaded: Loaded) -> None:
    asked: list[Recovery] = []

    async def recover(_: object, recovery: Recovery, *__: object) -> None:
        asked.append(recovery)

    class Diagnosing(Node):
        async def diagnose(self, *_: object) -> Conclusion:
            return Conclusion(events.Diagnosed("weights_corrupt", "", "", 65, True), Recovery((), True, True))

    rig = Rig(loaded, recover, Diagnosing)
    rig.driver._failed = cast(Any, Failed())
    assert isinstance(await rig.does(Action(Do.DIAGNOSE)), events.Diagnosed)
    for _ in range(2):
        assert await rig.does(Action(Do.RECOVER)) == events.Recovered()
    assert asked == [Recovery((), True, True), Recovery()]


async def test_a_refusal_and_an_error_of_our_own_both_become_events(loaded: Loaded) -> None:
    raised: list[Exception] = [Stop("gpu_lost", "GPU 0 no longer answers", "reset it"), KeyError("x")]

    async def recover(*_: object) -> None:
        raise raised.pop(0)

    rig = Rig(loaded, recover)
    assert await rig.does(Action(Do.RECOVER)) == events.Refused("gpu_lost", "GPU 0 no longer answers", "reset it", 69)
    refused = await rig.does(Action(Do.RECOVER))
    assert isinstance(refused, events.Refused) and (refused.cause, refused.exit_code) == ("unknown", 70)


async def test_a_kill_before_anything_was_spawned_ends_at_once(loaded: Loaded) -> None:
    assert await Rig(loaded).does(Action(Do.KILL)) == events.TreeGone(1)


async def test_exit_leaves_with_the_code_of_the_state(loaded: Loaded) -> None:
    driver = Rig(loaded).driver
    driver.perform(machine.State(machine.Limits(), exit_code=77), (Action(Do.EXIT),))
    assert driver.exit_code == 77


class Failed:
    """A run whose end was seen."""

    def __init__(self) -> None:
        from entrypoint.state.boots import Boot

        self.boot = Boot(id="x-1-1", started_at=0.0, fingerprint="f")
