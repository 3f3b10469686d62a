"""The same faults under three supervisors, in one run: relaunch, circus and supervisord, each doing what it can.

    python benchmarks/supervisors.py [--repeats 3]

The engine is the fake tree of tests/engine, which behaves as real sglang 0.5.23 did: it takes 5 s to die after its
scheduler was killed, and its children outlive it when they are hit before their parent-death signal is set. circus and
supervisord come from PyPI into a temporary environment.
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
import venv
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "engine"))

from supervisor import FAKE, FAKE_SERVE, free_ports  # noqa: E402

PLAN = {"dying_seconds": 5, "start_seconds": 0.3, "death_signal_after": 1.0}
PATIENCE = 40.0
HANG_TIMEOUT = 5
CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "vocab_size": 100,
    "type_vocab_size": 2,
}


def engines(port: int) -> list[psutil.Process]:
    """Living mains of the fake engine on this port, oldest first."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if command[1:2] == [FAKE] and str(port) in command and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda p: p.create_time())


def parts(main: psutil.Process) -> dict[str, psutil.Process]:
    named = {}
    for child in main.children():
        try:
            named[child.cmdline()[0].removeprefix("sglang::")] = child
        except (psutil.Error, IndexError):
            continue
    return named


def listening(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def wait(condition: Callable[[], bool], seconds: float = PATIENCE) -> float | None:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if condition():
            return time.monotonic() - began
        time.sleep(0.02)
    return None


def relaunch(folder: Path, port: int, _: Path) -> subprocess.Popen[bytes]:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    environ = os.environ | {
        "FAKE_ENGINE": json.dumps(PLAN),
        "RELAUNCH_MODEL": str(model),
        "RELAUNCH_DEVICE": "cpu",
        "RELAUNCH_ENGINE_ARGS": "--load-format dummy",
        "RELAUNCH_PORT": str(port),
        "RELAUNCH_CONTROL_PORT": str(free_ports(1)[0]),
        "RELAUNCH_STATE_DIR": str(folder / "state"),
        "RELAUNCH_CACHE_DIR": str(folder / "cache"),
        "RELAUNCH_HANG_TIMEOUT": str(HANG_TIMEOUT),
        "RELAUNCH_MAX_RESTARTS": "100",
        "RELAUNCH_BACKOFF_MAX": "0",
    }
    return start([sys.executable, "-P", "-c", FAKE_SERVE], folder, environ)


def circus(folder: Path, port: int, tools: Path) -> subprocess.Popen[bytes]:
    (folder / "circus.ini").write_text(
        "[watcher:engine]\n"
        f"cmd = {sys.executable} {FAKE} --model-path m --port {port}\n"
        "copy_env = True\nrespawn = True\ngraceful_timeout = 5\n"
    )
    environ = os.environ | {"FAKE_ENGINE": json.dumps(PLAN)}
    return start([str(tools / "circusd"), str(folder / "circus.ini")], folder, environ)


def supervisord(folder: Path, port: int, tools: Path) -> subprocess.Popen[bytes]:
    (folder / "supervisord.conf").write_text(
        f"[supervisord]\nnodaemon=true\nuser=root\nlogfile={folder}/s.log\npidfile={folder}/s.pid\n"
        f"[program:engine]\ncommand={sys.executable} {FAKE} --model-path m --port {port}\n"
        "autorestart=true\nstartsecs=0\nstopasgroup=true\nkillasgroup=true\n"
    )
    environ = os.environ | {"FAKE_ENGINE": json.dumps(PLAN)}
    return start([str(tools / "supervisord"), "-c", str(folder / "supervisord.conf")], folder, environ)


def start(command: list[str], folder: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    with open(folder / "out", "ab") as out:
        return subprocess.Popen(command, cwd=folder, env=environ, stdout=out, stderr=subprocess.STDOUT)


FAULTS = {
    "scheduler killed": ("scheduler", signal.SIGKILL),
    "main killed": ("main", signal.SIGKILL),
    "scheduler stopped": ("scheduler", signal.SIGSTOP),
}


def measure(how: Callable[..., subprocess.Popen[bytes]], fault: str, tools: Path) -> dict[str, float | int | None]:
    victim, sig = FAULTS[fault]
    port = free_ports(1)[0]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        supervisor = how(Path(name), port, tools)
        try:
            if wait(lambda: listening(port) and bool(engines(port)), 60) is None:
                raise SystemExit(Path(name, "out").read_text()[-2000:])
            time.sleep(4.0)
            main = engines(port)[0]
            old = [main, *main.children(recursive=True)]
            (main if victim == "main" else parts(main)[victim]).send_signal(sig)
            respawned = wait(lambda: any(p.pid != main.pid for p in engines(port)))
            beside = sum(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in old) if respawned else None
            ready = wait(lambda: listening(port)) if respawned is not None else None
            return {
                "respawn": respawned,
                "ready": respawned + ready if respawned is not None and ready is not None else None,
                "old_processes_beside_the_new": beside,
            }
        finally:
            tree = psutil.Process(supervisor.pid).children(recursive=True)
            supervisor.terminate()
            try:
                supervisor.wait(20)
            except subprocess.TimeoutExpired:
                supervisor.kill()
            for process in [*tree, *engines(port)]:
                if process.is_running():
                    process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        venv.create(name, with_pip=True)
        subprocess.run([f"{name}/bin/pip", "install", "-q", "circus", "supervisor", "setuptools<80"], check=True)
        tools = Path(name, "bin")
        rows: dict[str, dict[str, object]] = {}
        for how in (relaunch, circus, supervisord):
            for fault in FAULTS:
                runs = [measure(how, fault, tools) for _ in range(options.repeats)]
                row: dict[str, object] = {}
                for key in runs[0]:
                    values = [run[key] for run in runs if run[key] is not None]
                    row[key] = round(statistics.median(values), 2) if len(values) == len(runs) else "never"  # type: ignore[type-var]
                rows[f"{how.__name__}: {fault}"] = row
                print(how.__name__, fault, row, flush=True)
    print(json.dumps({"rows": rows, "repeats": options.repeats, "load_1min": os.getloadavg()[0]}, indent=1))


if __name__ == "__main__":
    main()
