"""What one run remembers of its log: nothing that a client can have written counts as a reading or as progress."""

from __future__ import annotations

from typing import Any, cast

import pytest

from entrypoint.engine import log
from entrypoint.engine.run import KEEP_LINES, Run
from entrypoint.engine.scrape import parse
from entrypoint.scrub import Scrubber

STAMP = "[2026-11-30 10:00:00 TP{}]"
READY = "[2026-11-30 10:00:00] The server is fired up and ready to roll!"
WEIGHTS = "Load weight end. elapsed=1.0 s, type=X, dtype=torch.bfloat16, avail mem={} GB, mem usage={} GB."


def run(ranks: int = 2) -> tuple[Run, list[log.Event]]:
    """A run without an engine, of ``ranks`` ranks on GPUs of 96 GB, and the events that it reports."""
    events: list[log.Event] = []
    made = Run(1, cast(Any, None), Scrubber(()), ranks, 96e9, lambda line: None, events.append, lambda end: None)
    return made, events


def weights(rank: int, free: float = 10.0, used: float = 50.0) -> str:
    return f"{STAMP.format(rank)} {WEIGHTS.format(free, used)}"


def test_readings_are_of_ranks_that_exist() -> None:
    made, events = run(ranks=2)
    for rank in (0, 1, 7):
        made._line(f"{STAMP.format(rank)} Load weight begin. avail mem=80 GB")
        made._line(weights(rank))
    assert set(made.readings["weights"]) == {0, 1}
    assert {event.rank for event in events if isinstance(event, log.Reading)} == {0, 1}


@pytest.mark.parametrize(("free", "used"), [(10.0, 9999999.0), (9999999.0, 10.0)])
def test_no_reading_is_larger_than_a_gpu(free: float, used: float) -> None:
    made, _ = run()
    made._line(f"{STAMP.format(0)} Load weight begin. avail mem=80 GB")
    made._line(weights(0, free, used))
    assert all(value <= 96e9 for ranks in made.readings.values() for value in ranks.values())
    assert made.readings, "the credible one of the two stays"


def test_after_ready_a_line_is_neither_a_reading_nor_a_stage() -> None:
    made, events = run()
    made._line(READY)
    events.clear()
    for line in (weights(0), "server_args=ServerArgs(", f"{STAMP.format(0)} Capture cuda graph begin.", READY):
        made._line(line)
    assert made.readings == {} and made.stage == "serving" and events == []


def test_what_the_engine_outlived_is_told_by_line() -> None:
    made, _ = run()
    for line in ("starting", READY):
        made._line(line)
    assert made.survived() == (0, 0), "nobody has asked it anything yet"
    made._line("an error in a request")
    asked = made.heard
    made._line("an error after that")
    made.prove_healthy(asked)
    first, last = made.survived()
    assert list(made.lines)[first - 1 : last] == ["an error in a request"]
    made.prove_healthy(0)
    assert made.survived() == (first, last), "an older proof takes nothing back"


def test_lines_that_are_no_longer_kept_are_not_counted() -> None:
    made, _ = run()
    made._line(READY)
    for number in range(KEEP_LINES):
        made._line(f"line {number}")
    made.prove_healthy(made.heard - 10)
    first, last = made.survived()
    assert (first, last) == (1, KEEP_LINES - 10)


def test_a_client_that_leaves_is_no_sign_of_tokens() -> None:
    """The engine counts an aborted request where the client leaves, while its scheduler may hang."""
    text = 'sglang:num_aborted_requests_total{model="x"} 7.0\nsglang:generation_tokens_total{model="x"} 5.0\n'
    assert parse(text, 0.0).tokens == 5.0
