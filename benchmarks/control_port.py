"""The control port under load: 200 probes a second for a minute while the engine boots and is killed.

    python -P benchmarks/control_port.py [--seconds 60] [--rate 200] [--kill-after 30]

Starts `relaunch serve` with the rehearsal preset on free ports and a fresh state directory, asks every endpoint in
turn over a new connection each (as orchestrators do), kills the engine's main process in the middle, and prints a
table: answers, median, 99th percentile and worst by endpoint, and what the supervisor used.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

PATHS = ("/livez", "/readyz", "/startupz", "/plan", "/history", "/metrics", "/status", "/")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


START = time.perf_counter()
# When answers took longer than SLOW, in whole seconds of the run.
SLOW = 0.25
slow_at: set[int] = set()


async def ask(port: int, path: str, took: dict[str, list[float]], failed: dict[str, int]) -> None:
    began = time.perf_counter()
    try:
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
        status = int(answer.split(b" ", 2)[1])
        if status not in (200, 503):
            failed[path] += 1
    except (OSError, TimeoutError, IndexError, ValueError):
        failed[path] += 1
        return
    took[path].append(time.perf_counter() - began)
    if took[path][-1] > SLOW:
        slow_at.add(int(began - START))


async def load(
    port: int, seconds: float, rate: float, kill_after: float, supervisor: psutil.Process
) -> tuple[dict[str, list[float]], dict[str, int], str]:
    took: dict[str, list[float]] = defaultdict(list)
    failed: dict[str, int] = defaultdict(int)
    tasks: set[asyncio.Task[None]] = set()
    began = time.perf_counter()
    killed = ""
    globals()["START"] = began
    for n in range(round(seconds * rate)):
        if not killed and n / rate >= kill_after:
            children = supervisor.children()
            killed = f"main process of the engine killed after {n / rate:.0f} s"
            for child in children:
                child.send_signal(signal.SIGKILL)
        task = asyncio.create_task(ask(port, PATHS[n % len(PATHS)], took, failed))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(max(0.0, began + (n + 1) / rate - time.perf_counter()))
    await asyncio.gather(*tasks)
    return took, failed, killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--kill-after", type=float, default=30)
    options = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("RELAUNCH_")} | {
            "RELAUNCH_PRESET": "rehearsal",
            "RELAUNCH_STATE_DIR": folder,
            "RELAUNCH_PORT": str(free_port()),
            "RELAUNCH_CONTROL_PORT": str(port),
        }
        command = [sys.executable, "-P", "-m", "entrypoint", "serve"]
        with Path(folder, "serve.log").open("wb") as log:
            serve = subprocess.Popen(command, env=environ, stderr=log)
        try:
            began = time.perf_counter()
            while time.perf_counter() - began < 30:
                with socket.socket() as sock:
                    if sock.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.01)
            up = time.perf_counter() - began
            supervisor = psutil.Process(serve.pid)
            before = supervisor.cpu_times()
            work = load(port, options.seconds, options.rate, options.kill_after, supervisor)
            took, failed, killed = asyncio.run(work)
            after = supervisor.cpu_times()
            cpu = (after.user + after.system - before.user - before.system) / options.seconds
            rss = supervisor.memory_info().rss / (1 << 20)
        finally:
            serve.terminate()
            serve.wait(60)
        lines = Path(folder, "serve.log").read_text(errors="replace").splitlines()
        moments = [line for line in lines if " relaunch " in line]
    every = sorted(value for values in took.values() for value in values)
    busy = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"control port up after {up:.2f} s; {killed}; {busy}")
    print(f"{len(every)} answers, {sum(failed.values())} failures, median {1000 * statistics.median(every):.1f} ms\n")
    print("| path | answers | median ms | p99 ms | worst ms |\n|---|---|---|---|---|")
    for path in PATHS:
        values = sorted(took[path])
        if values:
            p99 = values[min(len(values) - 1, int(len(values) * 0.99))]
            middle = statistics.median(values)
            print(f"| `{path}` | {len(values)} | {1000 * middle:.1f} | {1000 * p99:.1f} | {1000 * values[-1]:.1f} |")
    print(f"\nseconds of the run with an answer slower than {SLOW} s: {sorted(slow_at) or 'none'}")
    print(f"supervisor: {100 * cpu:.0f}% of a core under this load, {rss:.0f} MiB resident")
    print("\n".join(line[:160] for line in moments if "->" in line or "ended" in line or "started" in line))


if __name__ == "__main__":
    main()
