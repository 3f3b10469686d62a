"""A supervisor of its own for tests: `relaunch serve` as a child process, watched through its control port."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
BOOT_SECONDS = 600.0
LAUNCHER = str(ROOT / "entrypoint" / "engine" / "launcher.py")
FAKE = str(Path(__file__).with_name("fake_engine.py"))
# The same supervisor with a fake tree in sglang's place.
FAKE_SERVE = (
    "import sys; from entrypoint.engine import command; "
    f"command.LAUNCHER = ({FAKE!r},); "
    "from entrypoint.cli import main; sys.exit(main(['serve']))"
)


def free_ports(count: int) -> list[int]:
    socks = [socket.socket() for _ in range(count)]
    for sock in socks:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return ports


def held_open(paths: set[str]) -> set[str]:
    """Those that a process has mapped: another engine's of this machine, when ours are all gone."""
    held: set[str] = set()
    for pid in psutil.pids() if paths else ():
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            held |= {path for path in paths if path in maps}
    return held


class Supervisor:
    """Starts at once; ``close`` ends whatever is left. ``script``: run in place of `relaunch serve`, with an engine
    whose command line starts with ``fake``; ``under``: words before the command; ``opening``: entered around each
    connection to it."""

    def __init__(
        self,
        folder: Path,
        *,
        fake_engine: bool = False,
        script: str | None = None,
        fake: str = FAKE,
        under: Sequence[str] = (),
        opening: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        **settings: str,
    ) -> None:
        self._opening, self.token = opening, settings.get("CONTROL_TOKEN")
        self.fake = fake
        self.port, self.control = free_ports(2)
        self.state = folder / "state"
        self.log_path = folder / f"serve-{time.monotonic_ns()}.log"
        self.shm_before = set(os.listdir("/dev/shm"))
        environ = {k: v for k, v in os.environ.items() if not k.startswith("RELAUNCH_")}
        environ |= {
            "RELAUNCH_PRESET": "rehearsal",
            "RELAUNCH_STATE_DIR": str(self.state),
            "RELAUNCH_CACHE_DIR": str(folder / "cache"),
            "RELAUNCH_PORT": str(self.port),
            "RELAUNCH_CONTROL_PORT": str(self.control),
        }
        for name, value in settings.items():
            environ[f"RELAUNCH_{name}"] = value
        with open(self.log_path, "wb") as log:
            how = ["-c", FAKE_SERVE] if fake_engine else [script] if script else ["-m", "entrypoint", "serve"]
            self.process = subprocess.Popen(
                [*under, sys.executable, "-P", *how], env=environ, stdout=log, stderr=subprocess.STDOUT
            )

    # -- asking -----------------------------------------------------------------------------------------

    def get(self, path: str, port: int | None = None, body: Any = None, timeout: float = 30.0) -> tuple[int, Any]:
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(f"http://127.0.0.1:{port or self.control}{path}", data, headers)
        try:
            with self._opening(), urllib.request.urlopen(request, timeout=timeout) as response:
                text = response.read()
                status = response.status
        except urllib.error.HTTPError as error:
            text, status = error.read(), error.code
            error.close()
        except OSError:
            return 0, None
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text.decode()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def is_ready(self) -> bool:
        return self.get("/readyz")[0] == 200

    def phase(self) -> str | None:
        return (self.get("/readyz")[1] or {}).get("phase")

    def history(self) -> dict[str, Any]:
        return self.get("/history")[1]

    def embed(self, *texts: str) -> list[list[float]]:
        status, answer = self.get("/v1/embeddings", self.port, {"input": list(texts), "model": "m"}, 60)
        assert status == 200, answer
        return [row["embedding"] for row in answer["data"]]

    # -- waiting ----------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> float:
        """Seconds that it took; fails with the log's end."""
        began = time.monotonic()
        while not condition():
            assert self.process.poll() is None, f"supervisor ended {self.process.returncode}: {self.log[-3000:]}"
            assert time.monotonic() - began < seconds, f"{what} not within {seconds} s: {self.log[-3000:]}"
            time.sleep(0.1)
        return time.monotonic() - began

    def until_ready(self) -> float:
        return self.until(lambda: self.is_ready, BOOT_SECONDS, "ready")

    def wait(self, seconds: float = 60.0) -> int:
        return self.process.wait(seconds)

    # -- hurting ----------------------------------------------------------------------------------------

    def engine(self, role: str) -> psutil.Process:
        """The living engine process of that role: main, scheduler or detokenizer."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            if role == "main" and (LAUNCHER in command or command[1:2] == [self.fake]):
                return process
            if command and command[0].startswith(f"sglang::{role}"):
                return process
        raise AssertionError(f"no {role} in the tree")

    def engine_processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    # -- ending -----------------------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        """Processes with our mark, our ports, and shared memory that was not there before."""
        left = []
        for process in psutil.process_iter():
            try:
                with open(f"/proc/{process.pid}/environ", "rb") as file:
                    if f"RELAUNCH_STATE_DIR={self.state}".encode() in file.read() or self._marked(process.pid):
                        left.append(f"process {process.pid} {process.name()}")
            except (OSError, psutil.Error):
                continue
        for port in (self.port, self.control):
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    sock.bind(("127.0.0.1", port))
                except OSError:
                    left.append(f"port {port}")
        new = {f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - self.shm_before if "sglang" in name}
        return left + [f"shm {path}" for path in new - held_open(new)]

    def _marked(self, pid: int) -> bool:
        import hashlib

        mark = hashlib.sha256(os.fsencode(self.state.resolve())).hexdigest()[:12]
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"RELAUNCH_RUN_ID={mark}-".encode() in file.read()

    def close(self) -> None:
        if self.process.poll() is None:
            tree = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait()
            for process in tree:
                try:
                    process.kill()
                except psutil.Error:
                    continue
