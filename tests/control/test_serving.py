"""Rates, latencies and the history of a serving engine, from readings with known numbers."""

from __future__ import annotations

import control_fakes as fakes
import pytest

from entrypoint.control.serving import HISTORY, SERIES, Serving


def test_nothing_is_shown_before_the_first_reading() -> None:
    assert Serving().document(0.0) is None


def test_one_reading_has_gauges_and_no_rates() -> None:
    found = Serving()
    found.add(fakes.scrape(0.0, running=3, queued=2, used=48_700, decoded=500))
    document = found.document(1.0)
    assert document is not None
    assert (document["now"]["running"], document["now"]["queued"], document["now"]["kv_used"]) == (3, 2, 0.1)
    assert document["now"]["output"] is None
    assert document["quantiles"] == {}
    assert document["history"]["ages"] == []


def test_the_rate_counts_the_first_token_of_each_answer_too() -> None:
    found = Serving()
    found.add(fakes.scrape(0.0, decoded=1000, requests=10, prompted=100, cached=50))
    found.add(fakes.scrape(5.0, decoded=1490, requests=20, prompted=350, cached=800))
    document = found.document(5.0)
    assert document is not None
    now = document["now"]
    assert now["output"] == (490 + 10) / 5
    assert now["prompt"] == (250 + 750) / 5
    assert now["requests"] == 2
    assert now["cache_hits"] == 0.75
    assert document["totals"] == {"requests": 20, "aborted": 0, "prompt_tokens": 1150, "output_tokens": 1510}


def test_now_is_the_last_seconds_and_a_latency_the_last_minute() -> None:
    found = Serving()
    for step in range(61):
        found.add(fakes.scrape(5.0 * step, decoded=100.0 * step if step < 50 else 5000.0 + 300.0 * (step - 50)))
    document = found.document(300.0)
    assert document is not None
    assert document["now"]["output"] == 60
    assert document["history"]["output"][0] == 20
    assert document["quantiles"]["first_token"] is None


def test_quantiles_and_mean_of_the_last_minute() -> None:
    document = fakes.serving().document(fakes.time.monotonic())
    assert document is not None
    first = document["quantiles"]["first_token"]
    assert first["p50"] == pytest.approx(0.2 + 0.2 * 0.5 / 0.9, rel=1e-3)
    assert first["p95"] == pytest.approx(0.7, rel=1e-3)
    assert first["mean"] == pytest.approx(0.34, rel=1e-3)
    assert first["count"] == 120


def test_a_crash_stays_in_the_history_and_the_new_engine_begins_at_zero() -> None:
    found = Serving()
    for step in range(3):
        found.add(fakes.scrape(5.0 * step, decoded=1000.0 * step))
    found.new_engine()
    document = found.document(30.0)
    assert document is not None
    assert document["now"] is None
    assert document["totals"] is None
    found.add(fakes.scrape(60.0, decoded=10.0))
    found.add(fakes.scrape(65.0, decoded=60.0))
    document = found.document(65.0)
    assert document is not None
    assert document["now"]["output"] == 10
    assert document["history"]["ages"] == [60.0, 55.0, 0.0]
    assert document["history"]["output"] == [200, 200, 10]


def test_the_history_has_five_minutes_and_one_length() -> None:
    found = Serving()
    for step in range(400):
        found.add(fakes.scrape(5.0 * step, decoded=1.0 * step))
    document = found.document(2000.0)
    assert document is not None
    history = document["history"]
    assert {len(history[name]) for name in SERIES} == {len(history["ages"])}
    assert 55 <= len(history["ages"]) <= 61
    assert max(history["ages"]) <= HISTORY
