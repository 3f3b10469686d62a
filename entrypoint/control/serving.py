"""What the engine does now and did in the last minutes, from successive readings of its `/metrics`. Pure.

Rates are those of the newest readings; latencies are quantiles of the last minute, interpolated within the engine's own
histogram buckets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ..engine.scrape import Scrape, increase, quantile

# Seconds that the history, a latency and a rate of "now" look back.
HISTORY = 300.0
LATENCY = 60.0
NOW = 10.0
# Points of the history at the usual pace of a reading every five seconds or more.
_POINTS = 64

# What the history holds of each moment, as `Serving.document` names it.
SERIES = (
    "output",
    "prompt",
    "requests",
    "running",
    "queued",
    "kv_used",
    "cache_hits",
    "accepted",
    "first_token",
    "per_token",
    "latency",
)
_FIRST, _BETWEEN, _WHOLE = "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"

Point = dict[str, float | None]


class Serving:
    """The readings of one engine, and the history over all engines of this supervisor. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._scrapes: deque[Scrape] = deque()
        self._points: deque[tuple[float, Point]] = deque(maxlen=_POINTS)

    def new_engine(self) -> None:
        """An engine was spawned: its counters begin at 0. The history stays, so that a crash can be seen in it."""
        self._scrapes.clear()

    def add(self, scrape: Scrape) -> None:
        """Take a reading."""
        self._scrapes.append(scrape)
        while len(self._scrapes) > 2 and self._scrapes[1].at <= scrape.at - LATENCY:
            self._scrapes.popleft()
        if len(self._scrapes) > 1:
            self._points.append((scrape.at, _point(list(self._scrapes)[-2:], list(self._scrapes))))

    def document(self, now: float) -> dict[str, Any] | None:
        """Return what the status page shows; None before the first reading of a first engine.

        Tokens and requests are per second, latencies in seconds, ``cache_hits`` and ``kv_used`` shares of 1,
        ``accepted`` tokens per step of speculative decoding. ``history``: ``ages`` in seconds, oldest first, and a list
        of the same length for each name.
        """
        if not self._scrapes and not self._points:
            return None
        points = [(at, point) for at, point in self._points if at >= now - HISTORY]
        return {
            "now": self._now(),
            "quantiles": self._quantiles(),
            "totals": self._totals(),
            "history": {
                "ages": [round(now - at, 1) for at, _ in points],
                **{name: [_short(point[name]) for _, point in points] for name in SERIES},
            },
        }

    def _now(self) -> dict[str, Any] | None:
        scrapes = list(self._scrapes)
        if not scrapes:
            return None
        recent = [each for each in scrapes if each.at >= scrapes[-1].at - NOW - 2.0]
        newest = scrapes[-1]
        return {
            **{name: _short(value) for name, value in _point(recent, scrapes).items()},
            "kv_tokens": newest.value("max_total_num_tokens") or None,
            "kv_used_tokens": newest.value("kv_used_tokens"),
            "kv_cached_tokens": newest.value("kv_evictable_tokens"),
        }

    def _quantiles(self) -> dict[str, Any]:
        scrapes = list(self._scrapes)
        if len(scrapes) < 2:
            return {}
        old, new = scrapes[0], scrapes[-1]
        names = {"first_token": _FIRST, "per_token": _BETWEEN, "latency": _WHOLE}
        return {name: _spread(old, new, metric) for name, metric in names.items()}

    def _totals(self) -> dict[str, float] | None:
        """What this engine has served, the canaries among it."""
        if not self._scrapes:
            return None
        newest = self._scrapes[-1]
        return {
            "requests": newest.value("num_requests_total"),
            "aborted": newest.value("num_aborted_requests_total"),
            "prompt_tokens": newest.value("prompt_tokens_total"),
            "output_tokens": newest.value("generation_tokens_total"),
        }


def _point(recent: Sequence[Scrape], minute: Sequence[Scrape]) -> Point:
    """Rates over ``recent``, latencies over ``minute``, and the gauges of the newest reading of both."""
    old, new = recent[0], recent[-1]
    seconds = new.at - old.at
    # A decode step is counted without the first token of each answer, which the prefill computes.
    output = increase(old, new, "realtime_tokens_total", "decode") + increase(old, new, _FIRST + "_count")
    computed = increase(old, new, "realtime_tokens_total", "prefill_compute")
    cached = increase(old, new, "realtime_tokens_total", "prefill_cache")
    pool = new.value("max_total_num_tokens")
    rate = 1.0 / seconds if seconds > 0 else None
    return {
        "output": None if rate is None else output * rate,
        "prompt": None if rate is None else (computed + cached) * rate,
        "requests": None if rate is None else increase(old, new, "num_requests_total") * rate,
        "running": new.value("num_running_reqs"),
        "queued": new.value("num_queue_reqs"),
        "kv_used": new.value("kv_used_tokens") / pool if pool else None,
        "cache_hits": _hits(minute[0], new),
        "accepted": new.value("spec_accept_length") or None,
        "first_token": _middle(minute[0], new, _FIRST),
        "per_token": _middle(minute[0], new, _BETWEEN),
        "latency": _middle(minute[0], new, _WHOLE),
    }


def _hits(old: Scrape, new: Scrape) -> float | None:
    """Share of the prompt tokens of the last minute that the prefix cache held; None without prompts."""
    computed = increase(old, new, "realtime_tokens_total", "prefill_compute")
    cached = increase(old, new, "realtime_tokens_total", "prefill_cache")
    return cached / (computed + cached) if computed + cached else None


def _labels(old: Scrape, new: Scrape, metric: str) -> tuple[str, ...]:
    """Streamed answers alone tell when the first token came; others are asked only when there were none."""
    if metric == _FIRST and increase(old, new, metric + "_count", "true"):
        return ("true",)
    return ()


def _middle(old: Scrape, new: Scrape, metric: str) -> float | None:
    return quantile(0.5, old, new, metric, *_labels(old, new, metric))


def _spread(old: Scrape, new: Scrape, metric: str) -> dict[str, float | None] | None:
    """p50, p95 and mean of a latency between two readings; None when nothing was observed."""
    labels = _labels(old, new, metric)
    count = increase(old, new, metric + "_count", *labels)
    if not count:
        return None
    return {
        "p50": _short(quantile(0.5, old, new, metric, *labels)),
        "p95": _short(quantile(0.95, old, new, metric, *labels)),
        "mean": _short(increase(old, new, metric + "_sum", *labels) / count),
        "count": count,
    }


def _short(value: float | None) -> float | None:
    """Five digits: what a page can show, and a third of the bytes."""
    return None if value is None else float(f"{value:.5g}")
