"""`relaunch wait`: until the model is served, for as long as that takes, saying where the start stands."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config import loading
from ..config.schema import Settings
from ..errors import EXIT_GAVE_UP, EXIT_OK, EXIT_UNAVAILABLE, Stop
from ..healing.labels import PHASE_LABELS, STAGE_LABELS
from ..state.post_mortems import history
from ..units import format_bytes, format_duration
from .progress_line import ProgressLine

# Seconds between two questions, and for which nobody may answer: a supervisor needs half a second to its control port.
EVERY = 1.0
GRACE = 15.0

Document = Mapping[str, Any]


def run(environ: Mapping[str, str], installing: Path | None) -> int:
    """Wait for the supervisor that the settings of ``environ`` name. ``installing``: the file in which
    `scripts/install.py` says how far it is. Returns 0 when clients are served. Raises Stop when it gave up (70) and
    when nobody answers (69)."""
    import httpx

    settings = loading.load(environ).settings
    address = settings.control_address
    began = time.time()
    # No proxy of the environment: this is a conversation with this host.
    with httpx.Client(base_url=address, trust_env=False, timeout=5.0) as http:

        def ask() -> Document | None:
            try:
                answer = {**http.get("/readyz").json()}
                return answer if answer.get("ready") else {**http.get("/startupz").json(), **answer}
            except (httpx.HTTPError, ValueError, TypeError):
                return None

        shown = ProgressLine(sys.stderr)
        try:
            wait(ask, lambda: installation(installing), lambda: last_words(settings, address, began), shown)
        finally:
            shown.end()
    print(f"relaunch: ready: http://{settings.host}:{settings.port}", file=sys.stderr)
    return EXIT_OK


def wait(
    ask: Callable[[], Document | None],
    installation: Callable[[], str | None],
    nobody: Callable[[], Stop],
    shown: ProgressLine,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Until ``ask`` answers that it is ready. ``ask``: the probes' documents in one, None while nobody answers.
    ``installation``: what the installer says, None while none works. Raises Stop when it gave up, and ``nobody`` when
    neither of the two was heard of for GRACE seconds."""
    heard = clock()
    phase: object = None
    while True:
        answer = ask()
        if answer is not None and answer.get("ready"):
            return
        if answer is not None and answer.get("phase") == "GAVE_UP":
            raise Stop("gave_up", f"it gave up: {answer.get('reason')}", exit_code=EXIT_GAVE_UP)
        text = describe(answer) if answer is not None else installation()
        if text is not None:
            heard = clock()
            now = (answer or {}).get("phase", "installing"), (answer or {}).get("stage")
            (shown.progress if now == phase else shown.line)(f"relaunch: {text}")
            phase = now
        elif clock() - heard > GRACE:
            raise nobody()
        else:
            shown.progress("relaunch: nobody answers yet")
        sleep(EVERY)


def describe(answer: Document) -> str:
    """Return phase, stage, percent and time left as text."""
    phase, stage = str(answer.get("phase")), answer.get("stage")
    shown = [PHASE_LABELS.get(phase, phase) + (f": {STAGE_LABELS.get(stage, stage)}" if stage else "")]
    progress = answer.get("progress") or {}
    if progress.get("bytes_total"):
        shown.append(f"{format_bytes(progress.get('bytes') or 0)} of {format_bytes(progress['bytes_total'])}")
    percent = answer.get("percent")
    if percent is not None and percent < 100:  # of a stage; others follow
        shown.append(f"{percent:.0f}%")
    if left := answer.get("estimate_seconds"):
        shown.append(f"about {format_duration(left)} left")
    elif (elapsed := answer.get("elapsed_seconds")) is not None:
        shown.append(f"{format_duration(elapsed)} so far")
    reason = answer.get("reason")
    if reason and not str(reason).startswith(phase):
        shown.append(str(reason))
    return ", ".join(shown)


def installation(status: Path | None) -> str | None:
    """What an installer that works now said last; None when there is none."""
    if status is None:
        return None
    try:
        with open(status, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.readline().strip() or "installing"
    except OSError:
        pass
    return None


def last_words(settings: Settings, address: str, since: float) -> Stop:
    """Why nobody answers, from what was kept since ``since`` (seconds of the epoch)."""
    state_dir = settings.state_dir
    ends = history(state_dir)["post_mortems"] if os.access(state_dir, os.R_OK | os.X_OK) else []
    last = ends[-1] if ends else None
    if last is not None and last["gave_up"] and _epoch(last["at"]) >= since:
        why = f"it gave up: {last['cause']}: {last['summary'] or 'see relaunch history'}"
        return Stop(last["cause"], why, "`relaunch history` tells the story", exit_code=EXIT_GAVE_UP)
    return Stop(
        "not_running",
        f"nobody answers on {address}",
        "start ./relaunch serve with the same settings; if it ran, its log says why it ended",
        exit_code=EXIT_UNAVAILABLE,
    )


def _epoch(stamp: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(stamp).timestamp()
