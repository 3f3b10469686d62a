"""What the control port offers beyond looking: the log's end, connection data, a restart, a report, a question."""

from __future__ import annotations

import asyncio
import ipaddress
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from ..config.schema import Settings
from ..control.app import Offers
from ..control.connect import Connection
from ..control.status import Status
from ..control.try_it import TryIt
from ..engine.client import EngineClient
from .logs import Log

# Seconds that a report may take: it examines the host.
REPORT_TIMEOUT = 120.0


def make(
    settings: Settings,
    environ: Mapping[str, str],
    status: Status,
    log: Log,
    restart: Callable[[], str | None],
    is_worker: bool,
) -> Offers:
    """Return what this supervisor offers. ``restart``: as in `Offers`; ``is_worker``: clients talk to another node.

    Without a control token nobody may ask the model for whom clients must send a key: the page would lend it.
    """
    may_ask = settings.try_it and not is_worker and (settings.control_token or not settings.api_key)
    reporting = asyncio.Lock()

    async def report() -> bytes:
        async with reporting:
            return await asyncio.to_thread(_report, environ)

    def facts() -> tuple[str, bool, int | None]:
        found = connection(settings, status, "127.0.0.1")
        return found.model, found.embedding, found.context_length

    return Offers(
        log=lambda: tuple(log.tail),
        connection=None if is_worker else lambda name: connection(settings, status, name),
        restart=restart,
        report=report,
        try_it=TryIt(lambda: EngineClient(settings.host, settings.port, settings.api_key), facts, lambda: status.ready)
        if may_ask
        else None,
    )


def connection(settings: Settings, status: Status, name: str) -> Connection:
    """Return how clients reach the model. ``name``: of this host, for an engine that listens on all its addresses."""
    plan = status.plan or {}
    host = settings.host
    if host in ("0.0.0.0", "::"):
        host = name
    argv = (plan.get("engine") or {}).get("argv") or ()
    return Connection(
        address=f"http://{f'[{host}]' if _is_v6(host) else host}:{settings.port}",
        model=model_name(settings, str((plan.get("model") or {}).get("id") or "")),
        context_length=plan.get("context_length"),
        key=settings.api_key is not None,
        embedding="--is-embedding" in argv,
    )


def model_name(settings: Settings, model: str) -> str:
    """Return a name under which the engine answers. It takes any without a colon, which would name an adapter
    (sglang 0.5.23, entrypoints/openai/serving_base.py); the hub's is the one that people know."""
    if settings.served_model_name:
        return settings.served_model_name
    if ":" in model or model.startswith("/") or not model:
        return settings.preset or Path(model).name.rpartition(":")[2] or "default"
    return model


def _is_v6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def _report(environ: Mapping[str, str]) -> bytes:
    """The archive that `relaunch report` writes, made by that command: it may take what a supervisor has not to spare.
    Raises OSError and SubprocessError."""
    with tempfile.TemporaryDirectory(prefix="relaunch-report-") as folder:
        path = Path(folder) / "report.tar.gz"
        command = [sys.executable, "-P", "-m", "entrypoint", "report", "-o", str(path)]
        subprocess.run(
            command,
            env=dict(environ),
            check=True,
            timeout=REPORT_TIMEOUT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return path.read_bytes()
