"""The router (smg) as a child: its arguments, its life, and the three things that we ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from ..config.schema import Settings
from ..engine.lines import strip_ansi
from ..host.parent_death import tied_to_parent
from ..supervisor.logs import Log
from .probe import get

# Seconds: to listen after the spawn, between two looks at a router that serves, and for an answer of it. On a host with
# fifteen busy processes a core, a router of low priority took more than 30 s to listen and 15 s to answer.
START_TIMEOUT = 120.0
CHECK_EVERY = 1.0
ANSWER_TIMEOUT = 5.0
# This many looks in a row without an answer: it hangs.
MAX_MISSED = 8
# A router that ran this long has given its failures back.
STABLE = 60.0
# Bytes of a request's body: a hundred pictures, or a book. The router's own limit is 512 MiB.
MAX_PAYLOAD = 64 << 20
# The engine's own limits decide how long a request may take; the router counts a stream's whole length.
_NO_LIMIT = 7 * 86_400
# It warns of every request that a client got wrong, in a line of its own.
_QUIET = "smg=warn,smg::response=error"


def arguments(settings: Settings, address: str, key: str, metrics_port: int) -> dict[str, Any]:
    """Fields of the router's `RouterArgs`. ``key`` guards who may change its workers.

    Retries are off: the router knows only an answer's status, so a request that has killed one engine would be
    carried to the next. The circuit breaker is off: it counts every 4xx against the replica, so one client with a
    wrong request would close all of them. Health checks are off: they would make the engines generate; `/readyz`
    is asked instead. Loads are not polled: the relays know what is in flight, and `/readyz` who takes requests.

    Where clients have a key it is asked for here, before a body is read; the replica checks it again.
    """
    return {
        "api_key": settings.api_key,
        "host": f"[{address}]" if ":" in address else address,
        "port": settings.port,
        "policy": "cache_aware",
        "max_payload_size": MAX_PAYLOAD,
        "disable_retries": True,
        "disable_circuit_breaker": True,
        "disable_health_check": True,
        "disable_load_monitoring": True,
        "worker_overload_protection": False,
        "disable_tokenizer_autoload": True,
        # Seconds for the head of a request.
        "header_read_timeout_secs": 10,
        "history_backend": "none",
        "request_timeout_secs": _NO_LIMIT,
        # Who is added has just said that it is ready.
        "worker_startup_timeout_secs": 10,
        "shutdown_grace_period_secs": max(1, round(settings.drain_timeout)),
        "prometheus_host": "127.0.0.1",
        "prometheus_port": metrics_port,
        # Unless RUST_LOG says otherwise. Its `info` is two lines a request.
        "log_level": "warn",
        "control_plane_api_keys": [["relaunch", "relaunch", key, "admin"]],
    }


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Our own less the secrets, which the router has no use for, and no proxy: its workers are on this host."""
    return {"RUST_LOG": _QUIET} | {
        name: value
        for name, value in environ.items()
        if not name.startswith(("RELAUNCH_", "HF_TOKEN")) and not name.lower().endswith("_proxy")
    }


def back_off(failures: int, settings: Settings) -> float:
    """Seconds before the next start after so many ends in a row; the first is at once."""
    if failures <= 1:
        return 0.0
    return float(min(settings.backoff_max, settings.backoff_initial * 2 ** min(failures - 2, 30)))


class Router:
    """``up``: it answers. ``generation`` counts its lives: what was registered in an earlier one is forgotten."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], log: Log) -> None:
        self._settings, self._environ, self._log = settings, environ, log
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        self.address = str(socket.getaddrinfo(settings.host, None, family, socket.SOCK_STREAM)[0][4][0])
        # What everybody binds is asked on this host.
        self._asked = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address)
        self._process: asyncio.subprocess.Process | None = None
        self._key = ""
        self._metrics_port = 0
        self._http: Any = None
        self._stopping = False
        self.up = False
        self.generation = 0
        self.reason = "the router is starting"

    # -- its life ---------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Start it, and start it again when it ends, until `stop`."""
        import httpx

        failures = 0
        while not self._stopping:
            began = time.monotonic()
            self._key = secrets.token_urlsafe(32)
            self._http = httpx.AsyncClient(
                base_url=f"http://{_bracketed(self._asked)}:{self._settings.port}",
                headers={"Authorization": f"Bearer {self._key}"},
                timeout=ANSWER_TIMEOUT,
                trust_env=False,
            )
            why = await self._live()
            self.up = False
            await self._http.aclose()
            if self._stopping:
                return
            failures = 1 if time.monotonic() - began > STABLE else failures + 1
            wait = back_off(failures, self._settings)
            self.reason = f"the router ended: {why}"
            self._log.error(f"{self.reason}; next start in {wait:.0f} s")
            await asyncio.sleep(wait)

    async def _live(self) -> str:
        """One life; why it ended."""
        self.generation += 1
        self._metrics_port = _free_port()
        given = arguments(self._settings, self.address, self._key, self._metrics_port)
        process = await asyncio.create_subprocess_exec(
            *tied_to_parent([sys.executable, "-P", "-m", "entrypoint.gateway.child"]),
            env=environment(self._environ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=1 << 20,
            start_new_session=True,
        )
        self._process = process
        assert process.stdin is not None
        process.stdin.write(json.dumps(given).encode())
        process.stdin.close()
        last: deque[str] = deque(maxlen=1)
        reading = asyncio.create_task(self._read(process, last))
        watching = asyncio.create_task(self._watch(process))
        code = await process.wait()
        watching.cancel()
        await asyncio.wait({reading}, timeout=1.0)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            if problem := await watching:
                return problem
        said = f" ({last[0][:300]})" if last and code > 0 else ""
        return (f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}") + said

    async def _read(self, process: asyncio.subprocess.Process, last: deque[str]) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # a line longer than the limit
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            self._log.engine(text)
            last.append(strip_ansi(text).strip())

    async def _watch(self, process: asyncio.subprocess.Process) -> str | None:
        """Says when it is up; ends one that hangs, and says so."""
        deadline = time.monotonic() + START_TIMEOUT
        while not await self._answers():
            if time.monotonic() > deadline:
                process.kill()
                return f"it did not listen within {START_TIMEOUT:.0f} s"
            await asyncio.sleep(0.05)
        self.up, self.reason = True, ""
        self._log.info(f"router up: pid {process.pid}, http://{_bracketed(self.address)}:{self._settings.port}")
        missed = 0
        while missed < MAX_MISSED:
            await asyncio.sleep(CHECK_EVERY)
            missed = 0 if self._stopping or await self._answers() else missed + 1
        process.kill()
        return f"no answer to {MAX_MISSED} questions in a row"

    async def _answers(self) -> bool:
        import httpx

        with contextlib.suppress(httpx.HTTPError):
            return bool((await self._http.get("/liveness")).status_code == 200)
        return False

    async def stop(self, timeout: float) -> None:
        """SIGTERM, ``patience`` seconds for what is under way, SIGKILL. With none: end it, whatever is under way."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), timeout)
        except TimeoutError:
            if timeout:
                self._log.warning(f"requests were still running after {timeout:.0f} s: ending the router")
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    # -- what we ask ------------------------------------------------------------------------------------

    async def add(self, url: str, model: str | None) -> str:
        """Take a worker in; returns its id once requests go there. ``model`` is the name that requests must have; the
        router answers 404 to others, where the engine takes any. Raises httpx.HTTPError, TimeoutError."""
        import httpx

        asked: dict[str, Any] = {"url": url, "disable_health_check": True}
        asked |= {"models": [{"id": model}], "runtime_type": "sglang"} if model else {}
        asked |= {"api_key": self._settings.api_key} if self._settings.api_key else {}
        answer = (await self._http.post("/workers", json=asked)).raise_for_status()
        worker = str(answer.json()["worker_id"])
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                while True:
                    known = await self._http.get(f"/workers/{worker}")
                    if known.status_code == 200 and known.json().get("is_healthy"):
                        return worker
                    await asyncio.sleep(0.02)
        except (httpx.HTTPError, TimeoutError):
            with contextlib.suppress(httpx.HTTPError):
                await self.remove(worker)  # nobody would know its id any more
            raise

    async def remove(self, worker: str) -> None:
        """No new requests to that worker. Raises httpx.HTTPError."""
        answer = await self._http.delete(f"/workers/{worker}")
        if answer.status_code != 404:
            answer.raise_for_status()

    async def metrics(self) -> bytes:
        """Its own Prometheus text; empty while it has none."""
        with contextlib.suppress(OSError, ValueError):
            async with asyncio.timeout(1.0):
                status, body = await get("127.0.0.1", self._metrics_port, "/metrics", 8 << 20)
                return body if status == 200 else b""
        return b""


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
