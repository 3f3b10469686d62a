"""Seconds from SIGKILL to ready with and without a standby, on the CPU: kills of each process in alternating pairs.

    .venv/bin/python benchmarks/standby.py [ROUNDS]

Two supervisors of the `rehearsal` preset serve side by side, one with RELAUNCH_STANDBY=on. In each round the first is
killed when its standby is ready, then the second. Prints the memory of an idle standby (PSS) once.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine"))

from supervisor import Supervisor

ROLES = ("scheduler", "main", "detokenizer")


def standby_state(supervisor: Supervisor) -> str:
    return str((supervisor.get("/status")[1] or {}).get("standby"))


def kill(supervisor: Supervisor, role: str) -> float:
    """SIGKILL one process; return the seconds until the next engine is ready."""
    boots = len(supervisor.history()["boots"])
    supervisor.engine(role).send_signal(signal.SIGKILL)
    began = time.monotonic()
    supervisor.until(lambda: len(supervisor.history()["boots"]) > boots, 60, "the next start")
    supervisor.until(lambda: supervisor.is_ready, 600, "ready")
    return time.monotonic() - began


def idle_memory(supervisor: Supervisor) -> list[int]:
    """MiB (PSS) of each process of the standby: those that wait have no title yet."""
    found = []
    for process in supervisor.engine_processes():
        try:
            if os.getsid(process.pid) != os.getsid(supervisor.engine("main").pid):
                found.append(process.memory_full_info().pss >> 20)
        except (psutil.Error, OSError):
            continue
    return sorted(found, reverse=True)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    took: dict[str, list[float]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory() as folder:
        supervisors = {}
        for state in ("on", "off"):
            (Path(folder) / state).mkdir()
            supervisors[state] = Supervisor(Path(folder) / state, STANDBY=state, MAX_RESTARTS="100")
            supervisors[state].until(lambda s=state: supervisors[s].is_ready, 900, "ready")
        try:
            for number in range(rounds):
                role = ROLES[number % len(ROLES)]
                supervisors["on"].until(lambda: standby_state(supervisors["on"]) == "ready", 900, "standby")
                if number == 0:
                    print("idle standby, MiB:", idle_memory(supervisors["on"]), flush=True)
                for state, supervisor in supervisors.items():
                    took[state].append(kill(supervisor, role))
                print(role, *(f"{state} {seconds[-1]:.1f}" for state, seconds in took.items()), flush=True)
        finally:
            for state, supervisor in supervisors.items():
                print(state, *[line for line in supervisor.log.splitlines() if "standby" in line], sep="\n  ")
                supervisor.terminate()
                supervisor.wait(60)
                print(state, "left:", supervisor.leftovers())
                supervisor.close()
    for state, seconds in took.items():
        print(state, f"median {statistics.median(seconds):.1f}", [round(value, 1) for value in seconds])


if __name__ == "__main__":
    main()
