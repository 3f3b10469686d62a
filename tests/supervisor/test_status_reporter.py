"""What a step of the machine shows outside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from entrypoint.control.status import Status
from entrypoint.supervisor import status_reporter


def test_a_wait_of_hours_for_changing_reasons_does_not_fill_the_log() -> None:
    now = [0.0]
    said: list[str] = []
    status = Status()
    log = cast(Any, SimpleNamespace(info=said.append))
    reporter = status_reporter.StatusReporter(status, log, cast(Any, None), {}, lambda: now[0])
    for beat in range(7200):  # an hour
        now[0] = beat / 2
        reporter.on_wait("no route" if beat % 3 else "timed out")
        if beat % 10 == 0:
            status.reason = "killed: what the machine shows at every tick"
    assert 1 < len(said) <= 3600 / status_reporter.WAIT_LOGGED_EVERY + 1
    assert status.reason in ("no route", "timed out"), "the status always has the present one"
    said.clear()
    for _ in range(7200):
        now[0] += 0.5
        reporter.on_wait("no route")
        status.reason = "killed: what the machine shows at every tick"
    assert len(said) <= 1
    reporter.on_wait(None)
    reporter.on_wait("no route")
    assert said[-1] == "no route", "a new wait is said at once"
