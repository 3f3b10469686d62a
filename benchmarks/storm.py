"""A seeded, resumable storm: kill or stop processes of the engine in every phase, and see that it always comes back.

    python benchmarks/storm.py --rounds 30 --seed 1 --out storm.json           the real engine on the CPU
    python benchmarks/storm.py --rounds 200 --seed 1 --fake --out storm.json   a fake tree that behaves alike

A report that exists already is gone on with: rounds that it holds are not run again. Each round draws a phase,
a victim and a signal from the seed and its own number, so that one round can be run again alone (--only N).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "engine"))

from supervisor import Supervisor  # noqa: E402

HANG_TIMEOUT = 15.0
# phase -> the text in the log of the boot under way that says that the phase is reached
PHASES = {
    "spawn": "engine started",
    "imports": "UserWarning",
    "distributed": "Init parallel begin",
    "loading": "Load weight begin",
    "warmup": "Uvicorn running",
    "ready": "",
    "recovering": "",
}
FAKE_PHASES = ("spawn", "ready", "recovering")
VICTIMS = ("main", "scheduler", "detokenizer", "resource_tracker")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


class Storm:
    def __init__(self, folder: Path, fake: bool) -> None:
        self.fake = fake
        settings = {
            "MAX_RESTARTS": "100000",
            "BACKOFF_INITIAL": "0.1s",
            "BACKOFF_MAX": "0.5s",
            "HANG_TIMEOUT": f"{2 if fake else HANG_TIMEOUT}s",
        }
        if fake:
            model = folder / "model"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(FAKE_CONFIG))
            settings |= {"PRESET": "", "MODEL": str(model), "DEVICE": "cpu", "ENGINE_ARGS": "--load-format dummy"}
            os.environ["FAKE_ENGINE"] = json.dumps(FAKE_BEHAVIOUR)
        self.supervisor = Supervisor(folder, fake_engine=fake, **settings)

    def begin(self) -> None:
        """Wait for the first READY; take the measure that leaks are held against."""
        self.supervisor.until_ready()
        self.me = psutil.Process(self.supervisor.process.pid)
        self.first = self.cost()

    def cost(self) -> dict[str, int]:
        """What a leak would show in."""
        return {
            "fds": self.me.num_fds(),
            "rss": self.me.memory_info().rss,
            "threads": self.me.num_threads(),
            "children": len(self.me.children(recursive=True)),
            "shm": len([name for name in os.listdir("/dev/shm") if "sglang" in name or "loky" in name]),
        }

    def round(self, seed: int, number: int) -> dict[str, Any]:
        draw = random.Random(f"{seed}-{number}")
        phase = draw.choice(FAKE_PHASES if self.fake else list(PHASES))
        victim, sig = draw.choice(VICTIMS[:3] if self.fake else VICTIMS), draw.choice(SIGNALS)
        if phase in ("spawn", "imports", "recovering") and not self.fake:
            victim = "main"  # sglang has no other process yet
        result: dict[str, Any] = {"round": number, "phase": phase, "victim": victim, "signal": sig.name}
        sup = self.supervisor
        sup.until_ready()
        offset = len(sup.log)
        boots = self.boots()
        if phase not in ("ready", "recovering"):
            sup.process.send_signal(signal.SIGHUP)
            sup.until(lambda: self.boots() > boots, 300, "the planned restart")
            boots = self.boots()
            text = PHASES[phase]
            sup.until(
                lambda: text in sup.log[offset:].partition("engine started")[2] or text == "engine started", 240, phase
            )
        old = {p.pid: p.create_time() for p in self.tree()}
        if phase == "recovering":
            # The second blow falls on what is left of the old engine, or on the new one: both must do no harm.
            self.strike("scheduler", signal.SIGKILL)
            time.sleep(draw.uniform(0.5, 1.5))
        patience = time.monotonic() + 3.0  # a victim that is not born yet
        while not (struck := self.strike(victim, sig)) and time.monotonic() < patience:
            time.sleep(0.05)
        result["struck"] = struck
        began = time.monotonic()
        if struck and victim != "resource_tracker":
            result["to_respawn"] = round(sup.until(lambda: self.boots() > boots, 300, "the next start"), 2)
            result["to_ready"] = round(sup.until(lambda: sup.is_ready, 600, "ready again"), 2) + result["to_respawn"]
        else:
            sup.until_ready()
        left = [pid for pid, born in old.items() if self._same(pid, born)]
        if struck and victim != "resource_tracker" and left:
            result["failure"] = f"processes of the old tree live on: {left}"
        result["seconds"] = round(time.monotonic() - began, 2)
        result["cost"] = self.cost()
        return result

    def boots(self) -> int:
        document = self.supervisor.get("/history")[1]
        return len(document["boots"]) if document else 0

    def tree(self) -> list[psutil.Process]:
        return self.supervisor.engine_processes()

    def strike(self, victim: str, sig: signal.Signals) -> bool:
        """False when there is no such process in this phase."""
        try:
            if victim == "resource_tracker":
                process = next(p for p in self.tree() if "resource_tracker" in " ".join(p.cmdline()))
            else:
                process = self.supervisor.engine(victim)
            process.send_signal(sig)
        except (AssertionError, StopIteration, psutil.Error):
            return False
        return True

    @staticmethod
    def _same(pid: int, born: float) -> bool:
        try:
            process = psutil.Process(pid)
            return process.create_time() == born and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


FAKE_CONFIG = {
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
FAKE_BEHAVIOUR = {"death_signal_after": 0.5, "dying_seconds": 5, "start_seconds": 0.2, "ignore_term": True}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    def median(key: str, sig: str) -> float | None:
        # While recovering, the next start was under way before the second blow.
        values = [r[key] for r in rounds if key in r and r["signal"] == sig and r["phase"] != "recovering"]
        return round(statistics.median(values), 2) if values else None

    return {
        "rounds": len(rounds),
        "failures": [r for r in rounds if "failure" in r],
        "struck": sum(bool(r.get("struck")) for r in rounds),
        "median_kill_to_respawn_seconds": median("to_respawn", "SIGKILL"),
        "median_stop_to_respawn_seconds": median("to_respawn", "SIGSTOP"),
        "median_kill_to_ready_seconds": median("to_ready", "SIGKILL"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--only", type=int)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    report: dict[str, Any] = {"seed": options.seed, "fake": options.fake, "rounds": []}
    if options.out.exists():
        report = json.loads(options.out.read_text())
    done = {r["round"] for r in report["rounds"]}
    wanted = [options.only] if options.only is not None else [n for n in range(options.rounds) if n not in done]
    folder = Path(tempfile.mkdtemp(prefix="storm."))
    storm = Storm(folder, options.fake)
    try:
        storm.begin()
        report.setdefault("first_cost", storm.first)
        for number in wanted:
            try:
                row = storm.round(report["seed"], number)
            except AssertionError as error:
                row = {"round": number, "failure": str(error)[-2000:], "signal": "?"}
            report["rounds"].append(row)
            report["summary"] = summary(report["rounds"])
            options.out.write_text(json.dumps(report, indent=1) + "\n")
            print(json.dumps(row), flush=True)
            if storm.supervisor.process.poll() is not None:
                print("the supervisor ended", file=sys.stderr)
                break
        storm.supervisor.terminate()
        code = storm.supervisor.wait(150)
        left = storm.supervisor.leftovers()
        if options.fake:  # its tree has no shared memory: what is there is that of a real engine beside it
            left = [item for item in left if not item.startswith("shm")]
        report["end"] = {"exit_code": code, "left": left}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        storm.supervisor.close()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report["summary"]))
    return 1 if report["summary"]["failures"] or report["end"]["left"] or report["end"]["exit_code"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
