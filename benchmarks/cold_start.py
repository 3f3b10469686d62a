"""What the launcher saves of a cold start, on the CPU: `python -m sglang.launch_server` and the launcher in turns.

    .venv/bin/python benchmarks/cold_start.py [PAIRS]

Starts the engine of the `rehearsal` preset as relaunch would and ends it when it says that it is up. Prints the CPU
seconds of the whole tree, which other work on the machine changes little, and the seconds on the clock.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from entrypoint.engine import command

READY = b"fired up and ready to roll"


def planned() -> command.Command:
    """The command of the preset; the variables that the plan adds are in it."""
    environ = {**os.environ, "RELAUNCH_PRESET": "rehearsal", "RELAUNCH_PORT": "30123"}
    plan = subprocess.run(
        [sys.executable, "-P", "-m", "entrypoint", "plan", "--json"], env=environ, capture_output=True, check=True
    )
    engine = json.loads(plan.stdout)["engine"]
    return command.Command(tuple(engine["argv"]), engine["env"])


def start(argv: tuple[str, ...], environ: dict[str, str]) -> tuple[float, float]:
    """CPU and clock seconds from the spawn until the engine says that it is up."""
    began = time.monotonic()
    process = subprocess.Popen(
        argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert process.stdout is not None
    try:
        if not any(READY in line for line in process.stdout):
            raise SystemExit("the engine ended before it was up")
        took = time.monotonic() - began
        main = psutil.Process(process.pid)
        times = [each.cpu_times() for each in (main, *main.children(recursive=True))]
        return sum(each.user + each.system for each in times), took
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        time.sleep(2.0)  # its children and its port


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    made = planned()
    environ = made.environment(os.environ, "benchmark-0-0", Path(tempfile.mkdtemp()))
    ways = {"stock": made.argv, "launcher": made.executed()}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(pairs):
        for way in ways if number % 2 == 0 else reversed(ways):
            found[way].append(start(ways[way], environ))
        print(*(f"{way} {cpu:.1f} CPU s, {clock:.1f} s;" for way in ways for cpu, clock in found[way][-1:]), flush=True)
    for way, rows in found.items():
        cpu, clock = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{way}: median {cpu:.1f} CPU s, {clock:.1f} s on the clock")


if __name__ == "__main__":
    main()
