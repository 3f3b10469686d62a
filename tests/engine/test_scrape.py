"""The engine's metrics as numbers: what is read, how ranks are put together, what two readings tell."""

from __future__ import annotations

import pytest

from entrypoint.engine.scrape import COUNTERS, GAUGES, HISTOGRAMS, Scrape, increase, parse, quantile

RANKS = """
sglang:num_running_reqs{dp_rank="0",pp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="1",pp_rank="0"} 4.0
sglang:num_running_reqs{dp_rank="0",pp_rank="1"} 3.0
sglang:num_running_reqs{dp_rank="0",pp_rank="0",priority="7"} 2.0
sglang:spec_accept_length{dp_rank="0"} 2.5
sglang:spec_accept_length{dp_rank="1"} 2.7
sglang:realtime_tokens_total{mode="decode",model_name="with \\"quotes\\", and a comma"} 10
sglang:realtime_tokens_total{mode="prefill_compute"} 32
sglang:fwd_occupancy{} NaN
sglang:num_queue_reqs{} NaN
sglang:num_queue_reqs{
# TYPE sglang:num_queue_reqs gauge
python_gc_objects_collected_total{generation="0"} 1.0
"""


def histogram(*counts: float) -> str:
    """A histogram of inter-token times with bounds 0.1, 0.2, 0.4 and infinity, and so many observations in each."""
    total, lines = 0.0, []
    for bound, count in zip(("0.1", "0.2", "0.4", "+Inf"), counts, strict=True):
        total += count
        lines.append(f'sglang:inter_token_latency_seconds_bucket{{le="{bound}"}} {total}')
    return "\n".join([*lines, f"sglang:inter_token_latency_seconds_count{{}} {total}"])


def test_ranks_that_serve_requests_of_their_own_are_summed_and_stages_of_one_pipeline_are_not() -> None:
    found = parse(RANKS, 5.0)
    assert found.value("num_running_reqs") == 7.0
    assert found.waiting == 7.0
    assert found.value("spec_accept_length") == 2.7
    assert found.value("realtime_tokens_total", "decode") == 10
    assert found.value("realtime_tokens_total", "prefill_compute", "decode") == found.tokens == 42
    assert not any(name == "num_queue_reqs" for name, _ in found.values), "no number is not zero"


def test_a_counter_that_fell_began_anew() -> None:
    old = parse("sglang:num_requests_total{} 100", 0.0)
    assert increase(old, parse("sglang:num_requests_total{} 130", 1.0), "num_requests_total") == 30
    assert increase(old, parse("sglang:num_requests_total{} 4", 1.0), "num_requests_total") == 4


@pytest.mark.parametrize(
    ("counts", "q", "expected"),
    [
        ((10, 0, 0, 0), 0.5, 0.05),
        ((5, 5, 0, 0), 0.5, 0.1),
        ((5, 5, 0, 0), 0.75, 0.15),
        ((0, 0, 4, 0), 1.0, 0.4),
        ((0, 0, 0, 3), 0.5, 0.4),  # beyond the last bound: that bound
        ((0, 0, 0, 0), 0.5, None),
    ],
)
def test_a_quantile_is_that_of_the_time_between_the_readings(
    counts: tuple[float, ...], q: float, expected: float | None
) -> None:
    before = (7, 1, 0, 2)
    old = parse(histogram(*before), 0.0)
    new = parse(histogram(*(a + b for a, b in zip(before, counts, strict=True))), 60.0)
    found = quantile(q, old, new, "inter_token_latency_seconds")
    assert found == (None if expected is None else pytest.approx(expected))


def test_the_first_reading_of_all_counts_from_zero() -> None:
    assert quantile(0.5, Scrape(0.0), parse(histogram(2, 0, 0, 0), 1.0), "inter_token_latency_seconds") == 0.05


@pytest.mark.engine
def test_the_pinned_engine_has_every_metric_under_this_name() -> None:
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec("sglang")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "srt" / "observability"
    source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    for name in (*COUNTERS, *GAUGES, *HISTOGRAMS):
        assert f'"sglang:{name}"' in source, name
