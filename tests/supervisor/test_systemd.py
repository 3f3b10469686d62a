"""What systemd is told, on a socket of our own."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from entrypoint.healing.phases import Phase
from entrypoint.supervisor.systemd import Notify


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.settimeout(2)
        yield channel


def told(channel: socket.socket) -> list[str]:
    return channel.recv(4096).decode().split("\n")


def silent(channel: socket.socket) -> bool:
    channel.setblocking(False)
    try:
        channel.recv(1)
    except BlockingIOError:
        return True
    return False


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": str(tmp_path / "notify"), **more}


def test_ready_is_said_once_and_only_when_clients_can_be_served(manager: socket.socket, tmp_path: Path) -> None:
    notify = Notify(environ(tmp_path), 60)
    notify.phase(Phase.STARTING)
    assert told(manager) == ["STATUS=STARTING"]
    notify.phase(Phase.READY)
    assert told(manager) == ["STATUS=READY", "READY=1"]
    notify.phase(Phase.RECOVERING)
    notify.phase(Phase.READY)
    assert told(manager) == ["STATUS=RECOVERING"] and told(manager) == ["STATUS=READY"]


def test_stopping_asks_for_the_time_that_a_drain_may_take(manager: socket.socket, tmp_path: Path) -> None:
    Notify(environ(tmp_path), 600).phase(Phase.DRAINING)
    assert told(manager) == ["STATUS=DRAINING", "STOPPING=1", "EXTEND_TIMEOUT_USEC=690000000"]


def test_a_reason_of_several_lines_is_one_line_and_no_assignment(manager: socket.socket, tmp_path: Path) -> None:
    Notify(environ(tmp_path), 60).phase(Phase.GAVE_UP, "bad\nREADY=1")
    assert told(manager) == ["STATUS=GAVE_UP: bad READY=1"]


def test_signs_of_life_come_twice_in_the_allowed_time(manager: socket.socket, tmp_path: Path) -> None:
    notify = Notify(environ(tmp_path, WATCHDOG_USEC="30000000", WATCHDOG_PID=str(os.getpid())), 60)
    assert (notify.within(None), notify.within(100.0), notify.within(3.0)) == (15.0, 15.0, 3.0)
    notify.alive()
    assert told(manager) == ["WATCHDOG=1"]


@pytest.mark.parametrize(
    "more", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}]
)
def test_nobody_waits_for_signs_of_life(manager: socket.socket, tmp_path: Path, more: dict[str, str]) -> None:
    notify = Notify(environ(tmp_path, **more), 60)
    notify.alive()
    assert notify.within(None) is None and silent(manager)


def test_an_abstract_socket() -> None:
    name = f"relaunch-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind("\0" + name)
        channel.settimeout(2)
        Notify({"NOTIFY_SOCKET": "@" + name}, 60).phase(Phase.READY)
        assert "READY=1" in told(channel)


@pytest.mark.parametrize("address", ["", "relative", "@", "/nowhere/at/all"])
def test_without_a_manager_nothing_happens(address: str) -> None:
    notify = Notify({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000"}, 60)
    notify.phase(Phase.READY)
    notify.alive()


def test_a_manager_that_does_not_read_does_not_stop_us(manager: socket.socket, tmp_path: Path) -> None:
    notify = Notify(environ(tmp_path, WATCHDOG_USEC="1000000"), 60)
    for _ in range(3000):
        notify.alive()
