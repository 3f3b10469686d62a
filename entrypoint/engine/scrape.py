"""The engine's `/metrics` as numbers, and what two readings of it tell: increases and quantiles. Pure.

Which series are read, and what they mean, is from sglang 0.5.23, srt/observability/metrics_collector.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

PREFIX = "sglang:"

# What is read of each metric: the label whose values are told apart, None where all series are one number.
COUNTERS: Mapping[str, str | None] = {
    "prompt_tokens_total": None,
    "generation_tokens_total": None,
    "cached_tokens_total": None,
    "num_requests_total": None,
    "num_aborted_requests_total": None,
    "spec_verify_calls_total": None,
    # Tokens as they are computed; those above are counted at the end of a request.
    "realtime_tokens_total": "mode",
}
GAUGES = (
    "num_running_reqs",
    "num_queue_reqs",
    "kv_used_tokens",
    "kv_evictable_tokens",
    "max_total_num_tokens",
    "spec_accept_length",
)
HISTOGRAMS: Mapping[str, str | None] = {
    # An answer that is not streamed is first heard of after some 50 tokens, or at its end.
    "time_to_first_token_seconds": "is_streaming",
    "inter_token_latency_seconds": None,
    "e2e_request_latency_seconds": None,
}
# Gauges of which the ranks' largest is shown, not their sum.
_LARGEST = ("spec_accept_length",)
# Counters that move while tokens are computed, wherever in the engine they are counted. Not that of aborted requests,
# which moves when a client leaves (`tokenizer_manager.py:abort_request`), also while nothing is computed.
_TOKENS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "realtime_tokens_total",
    "num_requests_total",
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

# Name of a metric without prefix, and the value of the label that tells its series apart ("" where none does).
Series = tuple[str, str]


@dataclass(frozen=True)
class Scrape:
    """One reading. ``at``: monotonic seconds; ``values``: counters, gauges, and ``_count`` and ``_sum`` of histograms;
    ``buckets``: of each histogram the observations up to each upper bound, in seconds."""

    at: float
    values: Mapping[Series, float] = field(default_factory=dict)
    buckets: Mapping[Series, Mapping[float, float]] = field(default_factory=dict)

    @property
    def tokens(self) -> float:
        """Sum of all token and request counters, of which only the change means something."""
        return sum(self.value(name) for name in _TOKENS)

    @property
    def waiting(self) -> float:
        """Requests that run or queue, as the scheduler last reported."""
        return self.value("num_running_reqs") + self.value("num_queue_reqs")

    def value(self, name: str, *labels: str) -> float:
        """The sum over the series of ``name``, over those with ``labels`` alone where any are given."""
        return sum(v for (n, label), v in self.values.items() if n == name and (not labels or label in labels))

    def has(self, name: str) -> bool:
        """Whether the engine has reported ``name`` at all."""
        return any(n == name for n, _ in self.values)


def parse(text: str, at: float) -> Scrape:
    """Return what is known of the exposition text of an engine; other lines, damaged ones too, are passed over.

    Ranks of one pipeline count the same tokens: only the first stage is read. Ranks of attention data parallelism
    serve requests of their own and are summed, as are the series of different clients' labels.
    """
    values: dict[Series, float] = {}
    buckets: dict[Series, dict[float, float]] = {}
    for line in text.splitlines():
        if not line.startswith(PREFIX):
            continue
        name, brace, rest = line[len(PREFIX) :].partition("{")
        histogram = _histogram(name) if brace else None
        if histogram is None and name not in COUNTERS and name not in GAUGES:
            continue
        number = _number(rest.rpartition(" ")[2])
        labels = dict(_LABEL.findall(rest))
        # With priorities, the gauges have a series for each beside the total.
        if number is None or labels.get("pp_rank", "0") != "0" or (name in GAUGES and labels.get("priority")):
            continue
        split = HISTOGRAMS[histogram] if histogram else COUNTERS.get(name)
        label = labels.get(split, "") if split else ""
        if histogram and name.endswith("_bucket"):
            bounds = buckets.setdefault((histogram, label), {})
            bound = float(labels.get("le", "inf"))
            bounds[bound] = bounds.get(bound, 0.0) + number
        else:
            earlier = values.get((name, label), 0.0)
            values[name, label] = max(earlier, number) if name in _LARGEST else earlier + number
    return Scrape(at, values, buckets)


def increase(old: Scrape, new: Scrape, name: str, *labels: str) -> float:
    """Return by how much a counter grew; a counter that fell began anew at 0."""
    before, after = old.value(name, *labels), new.value(name, *labels)
    return after - before if after >= before else after


def quantile(q: float, old: Scrape, new: Scrape, name: str, *labels: str) -> float | None:
    """Return the ``q`` quantile, in seconds, of what a histogram observed between two readings, None of nothing.

    As Prometheus' histogram_quantile: linear within the bucket it falls into, so it is as exact as the bucket is
    narrow; beyond the last finite bound it is that bound.
    """
    counts: dict[float, float] = {}
    for series, bounds in new.buckets.items():
        if series[0] == name and (not labels or series[1] in labels):
            earlier = old.buckets.get(series, {})
            for bound, count in bounds.items():
                counts[bound] = counts.get(bound, 0.0) + max(0.0, count - earlier.get(bound, 0.0))
    total = max(counts.values(), default=0.0)
    if total <= 0:
        return None
    wanted, lower, below = q * total, 0.0, 0.0
    for bound in sorted(counts):
        if counts[bound] >= wanted:
            if math.isinf(bound):
                return lower
            share = (wanted - below) / (counts[bound] - below) if counts[bound] > below else 1.0
            return lower + (bound - lower) * share
        lower, below = bound, counts[bound]
    return lower


def _histogram(name: str) -> str | None:
    for ending in ("_bucket", "_count", "_sum"):
        if name.endswith(ending) and name.removesuffix(ending) in HISTOGRAMS:
            return name.removesuffix(ending)
    return None


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
