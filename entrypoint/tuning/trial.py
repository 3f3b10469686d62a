"""One arm at work: a supervisor of its own as a child, on ports of its own that no client knows."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ..config import loading
from ..host.parent_death import tied_to_parent
from ..plan import Change
from ..state.post_mortems import PostMortems
from ..units import format_duration, utc

# Seconds between two looks at a start, and for which an ended engine's post-mortem is waited for.
EVERY = 0.5
LAST_WORDS = 10.0
# A drain without clients takes seven to nine seconds; a second signal hurries it.
END_TIMEOUT = 60.0
COMMAND = ("-m", f"{__package__}.trial_child")
# The supervisor of an arm gives up at the first end of its engine, and calls nobody.
_SETTINGS = {
    "RELAUNCH_HOST": "127.0.0.1",
    "RELAUNCH_CONTROL_HOST": "127.0.0.1",
    "RELAUNCH_MAX_RESTARTS": "0",
    "RELAUNCH_ON_GIVE_UP": "exit",
    "RELAUNCH_STANDBY": "off",
}
_DROPPED = ("RELAUNCH_GIVE_UP_COMMAND", "RELAUNCH_GIVE_UP_WEBHOOK", "RELAUNCH_GIVE_UP_WEBHOOK_FILE", "NOTIFY_SOCKET")


class Failed(Exception):
    """The arm cannot be measured; the text names the cause."""


class Trial:
    """An arm being served while it is entered; its output goes to `tune/arm.log` of the state directory."""

    def __init__(self, environ: Mapping[str, str], changes: Sequence[Change]) -> None:
        port, control = _free_ports(2)
        kept = {name: value for name, value in environ.items() if name not in _DROPPED}
        ports = {"RELAUNCH_PORT": str(port), "RELAUNCH_CONTROL_PORT": str(control)}
        self._environ = {**kept, **_SETTINGS, **ports}
        self.settings = loading.load(self._environ).settings
        self._changes, self._log = changes, self.settings.state_dir / "tune" / "arm.log"
        self._began = time.time()

    def __enter__(self) -> Trial:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        rows = json.dumps([change.document() for change in self._changes], default=str)
        command = [sys.executable, "-P", *COMMAND, rows]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                tied_to_parent(command),
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        for seconds in (0.0, END_TIMEOUT):
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                self._wait(seconds)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def ready(self, timeout: float) -> None:
        """Wait until it serves. Raises Failed when it ends, or takes longer than ``timeout`` seconds."""
        import httpx

        deadline = time.monotonic() + timeout
        with httpx.Client(trust_env=False, timeout=5.0) as http:
            while self._process.poll() is None:
                try:
                    if http.get(f"http://127.0.0.1:{self.settings.control_port}/readyz").status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                if time.monotonic() > deadline:
                    raise Failed(f"not ready after {format_duration(timeout)}")
                time.sleep(EVERY)
        raise Failed(self.why())

    def why(self) -> str | None:
        """Return why the engine ended: the cause that the catalogue gives it, else the last line of the log; None while
        it serves."""
        self._wait(LAST_WORDS)
        since = utc(self._began)
        ends = [row for row in PostMortems(self.settings.state_dir).read() if str(row["at"]) >= since]
        if ends:
            return f"{ends[-1]['cause']}: {ends[-1]['summary']}"
        if self._process.poll() is None:
            return None
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1][-300:] if lines else f"ended with {self._process.returncode}"

    def _wait(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


def _free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on now."""
    found = [socket.socket() for _ in range(count)]
    try:
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in found]
    finally:
        for each in found:
            each.close()
