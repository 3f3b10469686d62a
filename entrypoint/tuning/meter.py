"""What an engine and its GPUs did between two moments: tokens from its counters, energy from the GPUs' power."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..engine.scrape import Scrape, increase

# Seconds between two readings of the GPUs' power.
POWER_EVERY = 0.5


class PowerMeter:
    """Reads the GPUs' power in a thread while it is entered. ``read``: watts of every GPU that tells; may block."""

    def __init__(self, read: Callable[[], list[float]]) -> None:
        self._read = read
        self._sums: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="power", daemon=True)

    def __enter__(self) -> PowerMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=5.0)

    @property
    def watts(self) -> float | None:
        """The mean power of all GPUs together, None when none told."""
        return sum(self._sums) / len(self._sums) if self._sums else None

    def _follow(self) -> None:
        while True:
            if watts := self._read():
                self._sums.append(sum(watts))
            if self._over.wait(POWER_EVERY):
                return


def gpu_watts() -> list[float]:
    """Return the watts of every GPU of this host that tells them. Blocking."""
    from ..host import nvml

    return [reading.watts for reading in nvml.readings() if reading.watts is not None]


def engine_work(before: Scrape, after: Scrape) -> dict[str, Any]:
    """Return what the engine counted between two scrapes: tokens of prompts, the share of them from the cache,
    and accepted draft tokens per verification (None without speculation)."""
    prompt, generated = (increase(before, after, f"{kind}_tokens_total") for kind in ("prompt", "generation"))
    # Of a verification one token is the model's own; what is beyond are accepted drafts.
    verifications = increase(before, after, "spec_verify_calls_total")
    return {
        "prompt_tokens": prompt,
        "cached_share": increase(before, after, "cached_tokens_total") / prompt if prompt > 0 else None,
        "accepted_drafts": round(generated / verifications - 1, 3) if verifications > 0 else None,
    }
