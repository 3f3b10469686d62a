"""When a quiet engine is stuck. Pure: readings and times come in, a reason or None comes out. All in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Without an answer of the HTTP server for this many seconds the engine is not ready.
SUSPICIOUS_AFTER = 15.0


# A tick that comes this many seconds late was not waited for: this process itself did not run (a paused VM or
# container, SIGSTOP, swapping), and what it did not hear meanwhile says nothing of the engine.
SLEPT = 5.0


@dataclass
class Ticks:
    """Tells how long the watcher itself stood still between two looks that should be ``every`` seconds apart."""

    every: float
    last: float

    def gap(self, now: float) -> float:
        """Return the seconds by which all earlier times are to be shifted; 0.0 for a tick in time."""
        late = now - self.last - self.every
        self.last = now
        return late if late > SLEPT else 0.0


@dataclass
class StoppedWatch:
    """Finds a process that has been stopped by a signal (SIGSTOP, a debugger) for longer than ``timeout``."""

    timeout: float
    _since: float | None = None

    def shift(self, gap: float) -> None:
        """Leave out ``gap`` seconds in which nobody looked."""
        if self._since is not None:
            self._since += gap

    def check(self, now: float, stopped: Sequence[str]) -> str | None:
        """Take the processes that are stopped now; return why that is a hang, or None."""
        if not stopped:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        if now - self._since < self.timeout:
            return None
        return f"{', '.join(stopped)} has been stopped by a signal for {now - self._since:.0f} s"


@dataclass
class StartupWatchdog:
    """Finds a start-up that is stuck: for ``timeout`` seconds no log line, nothing read from disk, and no compiler at
    work below the engine. ``last``: when it last showed progress."""

    timeout: float
    began: float
    last: float = 0.0
    _bytes: int = 0
    _elsewhere: float = 0.0

    def __post_init__(self) -> None:
        self.last = self._elsewhere = self.began

    def shift(self, gap: float) -> None:
        """Leave out ``gap`` seconds in which nobody looked."""
        self.last += gap
        self._elsewhere += gap

    def progress(self, now: float) -> None:
        """Note a log line, a shard, a graph."""
        self.last = now

    def elsewhere(self, at: float) -> None:
        """Note that another node of the group showed progress at that time."""
        self._elsewhere = max(self._elsewhere, at)

    def check(self, now: float, stage: str, compiling: Sequence[str], bytes_read: int) -> str | None:
        """Take the compilers at work and the bytes read so far; return why the stage is stuck, or None."""
        if compiling or bytes_read > self._bytes:
            self.last = now
        self._bytes = max(self._bytes, bytes_read)
        quiet = now - max(self.last, self._elsewhere)
        if quiet < self.timeout:
            return None
        return f"no progress in stage {stage} for {quiet:.0f} s: no log line, no disk reads, no compiler"


@dataclass
class HangDetector:
    """Finds a serving engine that is stuck: tokens stop while something waits for them.

    ``timeout`` is HANG_TIMEOUT. What waits is either requests (as the engine's metrics say; those gauges can be
    stale, so they alone decide nothing while liveness requests are allowed) or our own liveness request, one token,
    sent when nothing was heard for half the timeout. One without an answer for the other half, and no token anywhere
    since, is a hang.
    """

    timeout: float
    liveness_requests: bool
    began: float
    _heard: float = 0.0
    _answered: float = 0.0
    _request_sent: float | None = None
    _request_out: bool = False
    _waiting_since: float | None = None

    def __post_init__(self) -> None:
        self._heard = self._answered = self.began

    def shift(self, gap: float) -> None:
        """Leave out ``gap`` seconds in which nobody looked."""
        self._heard += gap
        self._answered += gap
        if self._request_sent is not None:
            self._request_sent += gap
        if self._waiting_since is not None:
            self._waiting_since += gap

    def tokens(self, now: float) -> None:
        """Note that tokens were computed: a batch in the log, a counter that moved."""
        self._heard = now
        if self._waiting_since is not None:
            self._waiting_since = now

    def metrics_answered(self, now: float, waiting: float) -> None:
        """Note an answer of `/metrics`. ``waiting``: requests that run or queue."""
        self._answered = now
        if waiting <= 0:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now

    def compiling(self, now: float) -> None:
        """Note that a compiler works below the engine: the request that needs the kernel waits, and rightly."""
        self.tokens(now)
        self._answered = now
        if self._request_sent is not None:
            self._request_sent = now

    def wants_liveness_request(self, now: float) -> bool:
        """Return True when one should be sent now."""
        return self.liveness_requests and not self._request_out and now - self._heard >= self.timeout / 2

    def liveness_request_sent(self, now: float) -> None:
        """Note that one was sent."""
        self._request_out = True
        if self._request_sent is None:
            self._request_sent = now

    def liveness_request_ended(self, now: float, answered: bool) -> None:
        """Note its answer. One that was refused is sent again, and its time counts from the first one."""
        self._request_out = False
        if answered:
            self._request_sent = None
            self.tokens(now)
            self._answered = now

    def suspicious(self, now: float) -> bool:
        """Return True when it is not yet a hang, but no balancer should send more."""
        return now - self._answered > min(SUSPICIOUS_AFTER, self.timeout / 2)

    def check(self, now: float) -> str | None:
        """Return why the engine hangs, or None."""
        half = self.timeout / 2
        if self._request_sent is not None:
            since = max(self._request_sent, self._heard)
            if now - self._request_sent >= half and now - since >= half:
                waited = now - self._request_sent
                return f"a one-token request got no answer for {waited:.0f} s and no token was computed since"
            return None
        if now - self._answered >= self.timeout:
            return f"the engine's HTTP server has not answered for {now - self._answered:.0f} s"
        if not self.liveness_requests and self._waiting_since is not None and now - self._waiting_since >= self.timeout:
            return f"requests wait and no token was computed for {now - self._waiting_since:.0f} s"
        return None
