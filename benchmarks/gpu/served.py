"""One `relaunch serve` as a child process on chosen GPUs, seen from outside: ports, state files, GPU memory."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
MEMORY_SLACK = 512 << 20
SAMPLE_SECONDS = 0.1
_READING = re.compile(r'^relaunch_engine_log_(?:bytes|count)\{rank="(\d+)",reading="(\w+)"\} (\S+)$', re.M)


# Set when the whole run is to end: every wait does.
CUT = threading.Event()


class Failed(Exception):
    """A step did not come to its end; the text says which."""


class GpuMemory:
    """Free bytes of some GPUs (the least of them), sampled by a thread of its own."""

    def __init__(self, gpus: tuple[int, ...]) -> None:
        import pynvml

        self._nvml, self._gpus = pynvml, gpus
        pynvml.nvmlInit()
        self.samples: list[tuple[float, int]] = []
        self.idle = self.free()
        self._ending = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def free(self) -> int:
        handles = [self._nvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in self._gpus]
        return min(int(self._nvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles)

    def _sample(self) -> None:
        while not self._ending.wait(SAMPLE_SECONDS):
            self.samples.append((time.monotonic(), self.free()))

    def least(self, since: float) -> int | None:
        return min((free for at, free in self.samples if at >= since), default=None)

    def back_after(self, since: float) -> float | None:
        """Seconds from ``since`` until nearly all was free again, after it was not."""
        for at, free in list(self.samples):
            if at >= since and free >= self.idle - MEMORY_SLACK:
                return round(at - since, 2)
        return None

    def close(self) -> None:
        self._ending.set()


class Served:
    """Starts at once. Times are seconds since the start of this object unless said otherwise."""

    def __init__(
        self,
        folder: Path,
        cache: Path,
        gpus: tuple[int, ...],
        port: int,
        settings: Mapping[str, str],
        environment: Mapping[str, str],
        deadline: float,
        skew: float = 0.0,
    ) -> None:
        self.port, self.control, self.deadline = port, port + 1, deadline
        self.state, self.log_path = folder / "state", folder / f"serve-{time.monotonic_ns()}.log"
        self.readings: dict[str, dict[str, float]] = {}
        self.token = settings.get("CONTROL_TOKEN")
        environ = {k: v for k, v in os.environ.items() if not k.startswith("RELAUNCH_")}
        watcher = str(Path(__file__).with_name("peak"))
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), watcher, environ.get("PYTHONPATH")]))
        self.peaks = folder / "peaks"
        self.peaks.mkdir(parents=True, exist_ok=True)
        environ["PROOF_PEAK"] = str(self.peaks)
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        environ |= {
            "RELAUNCH_STATE_DIR": str(self.state),
            "RELAUNCH_CACHE_DIR": str(cache),
            "RELAUNCH_PORT": str(self.port),
            "RELAUNCH_CONTROL_PORT": str(self.control),
        }
        environ |= {f"RELAUNCH_{name}": value for name, value in settings.items()}
        environ |= environment
        how = ["-m", "entrypoint", "serve"]
        if skew:
            environ["PROOF_SKEW"] = str(skew)
            how = [str(Path(__file__).with_name("skewed_serve.py"))]
        self.began = time.monotonic()
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", *how], env=environ, stdout=log, stderr=subprocess.STDOUT
            )

    # -- asking ---------------------------------------------------------------------------------------------

    def get(self, path: str, port: int | None = None, body: Any = None, timeout: float = 10.0) -> tuple[int, Any]:
        """(status, JSON or text); status 0 when nobody answered."""
        data = json.dumps(body).encode() if body is not None else None
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(f"http://127.0.0.1:{port or self.control}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                text, status = response.read(), response.status
        except urllib.error.HTTPError as error:
            text, status = error.read(), error.code
            error.close()
        except OSError:
            return 0, None
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text.decode(errors="replace")

    def generate(self, tokens: list[int], new: int, timeout: float = 300.0) -> bool:
        body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": new, "ignore_eos": True, "temperature": 0}}
        status, answer = self.get("/generate", self.port, body, timeout)
        return status == 200 and isinstance(answer, dict) and "meta_info" in answer

    @property
    def is_ready(self) -> bool:
        return self.get("/readyz", timeout=2.0)[0] == 200

    def history(self) -> dict[str, Any]:
        """From the files, so that it works after the end too."""
        boots: dict[str, Any] = {}
        path = self.state / "boots.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            row = json.loads(line)
            boots[row["id"]] = row
        mortems = [json.loads(p.read_text()) for p in sorted((self.state / "post-mortems").glob("*.json"))]
        return {"boots": sorted(boots.values(), key=lambda row: _seconds(row["started_at"])), "post_mortems": mortems}

    def read(self) -> None:
        """Keep the newest numbers that the engine printed."""
        status, text = self.get("/metrics", timeout=2.0)
        for rank, name, value in _READING.findall(text) if status == 200 and isinstance(text, str) else []:
            self.readings.setdefault(name, {})[rank] = float(value)

    def torch(self) -> dict[str, float]:
        """What torch's allocator of the engine now running held at most so far, and holds now; GiB, worst rank."""
        living, worst = {process.pid for process in self.tree()}, dict[str, float]()
        for path in self.peaks.glob("*.json"):
            if int(path.stem) not in living:
                continue
            for name, value in json.loads(path.read_text()).items():
                if name != "device":
                    worst[name] = max(worst.get(name, 0.0), round(value / (1 << 30), 2))
        return worst

    def log_tail(self, size: int = 1500) -> str:
        return self.log_path.read_text(errors="replace")[-size:]

    # -- waiting --------------------------------------------------------------------------------------------

    @property
    def is_cut(self) -> bool:
        return CUT.is_set() or time.monotonic() > self.deadline

    def join(self, threads: list[threading.Thread], seconds: float) -> None:
        """Wait for ``threads``. Raises Failed when the run is cut."""
        ending = time.monotonic() + seconds
        while any(thread.is_alive() for thread in threads) and time.monotonic() < ending:
            if self.is_cut:
                raise Failed("cut while requests were under way")
            time.sleep(0.05)

    def until(self, condition: Callable[[], bool], seconds: float, what: str, every: float = 0.05) -> float:
        """Seconds that it took. Raises Failed."""
        began = time.monotonic()
        while not condition():
            now = time.monotonic()
            if self.process.poll() is not None:
                raise Failed(f"{what}: the supervisor ended with {self.process.returncode}: {self.log_tail()}")
            if now - began > seconds or self.is_cut:
                raise Failed(f"{what}: not within {now - began:.0f} s (or cut): {self.log_tail()}")
            time.sleep(every)
        return round(time.monotonic() - began, 2)

    def until_ready(self, seconds: float) -> float:
        def ready() -> bool:
            self.read()
            return self.is_ready

        return self.until(ready, seconds, "ready", 0.25)

    # -- hurting --------------------------------------------------------------------------------------------

    def tree(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            return []

    def scheduler(self, rank: int = 0) -> psutil.Process:
        found = []
        for process in self.tree():
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            if command and command[0].startswith("sglang::sched"):
                found.append((command[0], process))
        if len(found) <= rank:
            raise Failed(f"no scheduler of rank {rank} in the tree")
        return sorted(found, key=lambda item: item[0])[rank][1]

    def terminate(self, seconds: float = 60.0) -> dict[str, Any]:
        """SIGTERM, exit code and what is left."""
        began = time.monotonic()
        tree = self.tree()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code: int | None = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        left = [process.pid for process in tree if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        return {"exit_code": code, "seconds": round(time.monotonic() - began, 2), "left": left}

    def close(self) -> None:
        """End whatever is left, at once."""
        tree = self.tree()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in tree:
            try:
                process.kill()
            except psutil.Error:
                continue


def _seconds(when: Any) -> float:
    return datetime.fromisoformat(when).timestamp() if isinstance(when, str) else float(when)


def free_port(base: int) -> int:
    """The first of two neighbouring free ports from ``base`` on."""
    for port in range(base, base + 500, 2):
        try:
            for one in (port, port + 1):
                with socket.socket() as sock:
                    sock.bind(("127.0.0.1", one))
        except OSError:
            continue
        return port
    raise Failed(f"no free port from {base} on")
