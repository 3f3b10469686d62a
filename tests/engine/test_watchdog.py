"""When a quiet engine is stuck, and when it is only busy."""

from __future__ import annotations

import pytest

from entrypoint.engine import watchdog
from entrypoint.engine.watchdog import HangDetector, StartupWatchdog, StoppedWatch


def run(watchdog: HangDetector, seconds: int, start: int = 0, **happens: object) -> float | None:
    """Tick once a second; ``happens`` maps names to sets of seconds. Returns when the hang was declared."""
    answers = happens.get("pulse_answers", True)
    for second in range(start + 1, start + seconds + 1):
        now = float(second)
        if happens.get("metrics", True) and second % 5 == 0:
            watchdog.metrics_answered(now, float(happens.get("waiting", 0)))  # type: ignore[arg-type]
        if second in happens.get("tokens", ()):  # type: ignore[operator]
            watchdog.tokens(now)
        if second in happens.get("compiling", ()):  # type: ignore[operator]
            watchdog.compiling(now)
        if watchdog.wants_liveness_request(now):
            watchdog.liveness_request_sent(now)
            if answers:
                watchdog.liveness_request_ended(now + 0.1, True)
        if watchdog.check(now):
            return now
    return None


def test_an_idle_engine_that_answers_pulses_is_fine() -> None:
    assert run(HangDetector(60, True, 0.0), 600) is None


def test_an_idle_engine_that_answers_no_pulse_is_found_within_the_patience() -> None:
    found = run(HangDetector(60, True, 0.0), 600, pulse_answers=False)
    assert found is not None
    assert found <= 65


def test_a_hang_after_traffic_is_found_within_the_patience() -> None:
    found = run(HangDetector(60, True, 0.0), 600, pulse_answers=False, tokens=range(1, 200), waiting=3)
    assert found is not None
    assert 200 < found <= 199 + 65


def test_a_long_prefill_that_logs_its_chunks_is_no_hang() -> None:
    assert run(HangDetector(60, True, 0.0), 900, pulse_answers=False, tokens=range(0, 901, 25)) is None


def test_a_compiler_below_the_engine_is_no_hang() -> None:
    assert run(HangDetector(60, True, 0.0), 500, pulse_answers=False, compiling=range(501)) is None


def test_a_pulse_that_is_refused_again_and_again_is_a_hang() -> None:
    watchdog = HangDetector(60, True, 0.0)
    found = None
    for second in range(1, 200):
        now = float(second)
        if second % 5 == 0:
            watchdog.metrics_answered(now, 0)
        if watchdog.wants_liveness_request(now):
            watchdog.liveness_request_sent(now)
            watchdog.liveness_request_ended(now, answered=False)
        if watchdog.check(now):
            found = now
            break
    assert found is not None
    assert found <= 65


def test_an_http_server_that_stopped_answering_is_a_hang_and_suspicious_before() -> None:
    watchdog = HangDetector(60, False, 0.0)
    assert run(watchdog, 600, metrics=False) == 60
    early = HangDetector(60, False, 0.0)
    assert not early.suspicious(14)
    assert early.suspicious(16)


def test_without_pulses_waiting_requests_and_no_tokens_are_a_hang() -> None:
    found = run(HangDetector(60, False, 0.0), 600, waiting=2)
    assert found is not None
    assert found <= 70
    assert run(HangDetector(60, False, 0.0), 600, waiting=0) is None


def test_start_up_is_stuck_without_lines_reads_and_compilers() -> None:
    watchdog = StartupWatchdog(600, began=0.0)
    assert watchdog.check(599, "loading", [], 0) is None
    assert "loading" in str(watchdog.check(600, "loading", [], 0))


def test_start_up_that_reads_or_compiles_or_logs_is_not_stuck() -> None:
    watchdog = StartupWatchdog(600, began=0.0)
    assert watchdog.check(590, "loading", [], 1 << 30) is None
    assert watchdog.check(1100, "loading", [], 2 << 30) is None
    assert watchdog.check(1690, "graphs", ["cicc"], 2 << 30) is None
    watchdog.progress(2200)
    assert watchdog.check(2700, "graphs", [], 2 << 30) is None
    assert watchdog.check(2801, "graphs", [], 2 << 30)


def test_a_stopped_process_is_found_after_the_patience_and_forgiven_when_it_goes_on() -> None:
    watch = StoppedWatch(60)
    assert watch.check(0, ["scheduler (pid 1)"]) is None
    assert watch.check(30, []) is None
    assert watch.check(40, ["scheduler (pid 1)"]) is None
    assert "scheduler" in str(watch.check(100, ["scheduler (pid 1)"]))


@pytest.mark.parametrize("pause", [8.0, 14.0, 70.0, 3600.0])
def test_a_watcher_that_stood_still_itself_takes_no_engine_for_hung(pause: float) -> None:
    ticks, hang, stopped = watchdog.Ticks(1.0, 0.0), watchdog.HangDetector(10.0, True, 0.0), watchdog.StoppedWatch(10.0)
    start = watchdog.StartupWatchdog(10.0, 0.0)
    now = 0.0
    for tick in range(1, 9):
        now = tick + (pause if tick > 3 else 0.0)
        if gap := ticks.gap(now):
            for each in (hang, stopped, start):
                each.shift(gap)
        assert hang.check(now) is None and start.check(now, "loading", (), 0) is None
        assert stopped.check(now, ["scheduler"]) is None
    for tick in range(9, 13):
        now = tick + pause
        assert ticks.gap(now) == 0.0
    assert hang.check(now) and start.check(now, "loading", (), 0) and stopped.check(now, ["scheduler"])
