"""When is a quiet engine stuck? Pure: readings and time come in, a reason or None comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class StoppedWatch:
    """A process stopped by a signal (SIGSTOP, a debugger) for longer than ``patience`` seconds."""

    patience: float
    _since: float | None = None

    def check(self, now: float, stopped: Sequence[str]) -> str | None:
        if not stopped:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        if now - self._since < self.patience:
            return None
        return f"{', '.join(stopped)} has been stopped by a signal for {now - self._since:.0f} s"


@dataclass
class StartupWatchdog:
    """Start-up is stuck when a stage shows no progress for ``patience`` seconds: no log line, nothing read
    from disk, and no compiler at work below the engine."""

    patience: float
    began: float
    last: float = 0.0
    _bytes: int = 0
    _elsewhere: float = 0.0

    def __post_init__(self) -> None:
        self.last = self._elsewhere = self.began

    def progress(self, now: float) -> None:
        """A log line, a shard, a graph."""
        self.last = now

    def elsewhere(self, at: float) -> None:
        """Another node of the group showed progress at that time."""
        self._elsewhere = max(self._elsewhere, at)

    def check(self, now: float, stage: str, compiling: Sequence[str], bytes_read: int) -> str | None:
        if compiling or bytes_read > self._bytes:
            self.last = now
        self._bytes = max(self._bytes, bytes_read)
        quiet = now - max(self.last, self._elsewhere)
        if quiet < self.patience:
            return None
        return f"no progress in stage {stage} for {quiet:.0f} s: no log line, no disk reads, no compiler"


@dataclass
class HangDetector:
    """Serving is stuck when tokens stop while something waits for them. ``patience`` is HANG_TIMEOUT.

    What waits is either requests (as the engine's metrics say; those gauges can be stale, so they alone decide
    nothing while pulses are allowed) or our own pulse, a one-token request sent when nothing was heard for half
    the patience. A pulse without an answer for the other half, and no token anywhere since, is a hang.
    """

    patience: float
    pulses: bool
    began: float
    _heard: float = 0.0
    _answered: float = 0.0
    _pulse_sent: float | None = None
    _pulse_out: bool = False
    _waiting_since: float | None = None

    def __post_init__(self) -> None:
        self._heard = self._answered = self.began

    def tokens(self, now: float) -> None:
        """Tokens were computed: a batch in the log, a counter that moved."""
        self._heard = now
        if self._waiting_since is not None:
            self._waiting_since = now

    def metrics_answered(self, now: float, waiting: float) -> None:
        self._answered = now
        if waiting <= 0:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now

    def compiling(self, now: float) -> None:
        """A compiler works below the engine: the request that needs the kernel waits, and rightly."""
        self.tokens(now)
        self._answered = now
        if self._pulse_sent is not None:
            self._pulse_sent = now

    def wants_pulse(self, now: float) -> bool:
        return self.pulses and not self._pulse_out and now - self._heard >= self.patience / 2

    def pulse_sent(self, now: float) -> None:
        self._pulse_out = True
        if self._pulse_sent is None:
            self._pulse_sent = now

    def pulse_ended(self, now: float, answered: bool) -> None:
        """A pulse that was refused is sent again, and its time counts from the first one."""
        self._pulse_out = False
        if answered:
            self._pulse_sent = None
            self.tokens(now)
            self._answered = now

    def suspicious(self, now: float) -> bool:
        """Not yet a hang, but no balancer should send more."""
        return now - self._answered > min(15.0, self.patience / 2)

    def check(self, now: float) -> str | None:
        half = self.patience / 2
        if self._pulse_sent is not None:
            since = max(self._pulse_sent, self._heard)
            if now - self._pulse_sent >= half and now - since >= half:
                waited = now - self._pulse_sent
                return f"a one-token request got no answer for {waited:.0f} s and no token was computed since"
            return None
        if now - self._answered >= self.patience:
            return f"the engine's HTTP server has not answered for {now - self._answered:.0f} s"
        if not self.pulses and self._waiting_since is not None and now - self._waiting_since >= self.patience:
            return f"requests wait and no token was computed for {now - self._waiting_since:.0f} s"
        return None
