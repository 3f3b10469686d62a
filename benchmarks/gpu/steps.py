"""What a case does with a served model once it was started, step by step. Every step returns what it saw."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import account
from served import Failed, GpuMemory, Served

NEW_TOKENS = 16
GIB = 1 << 30


@dataclass
class Bench:
    """One case under way. ``start`` makes another supervisor on the same state."""

    served: Served
    memory: GpuMemory
    start: Callable[[], Served]
    boot_seconds: float
    gpus: tuple[int, ...]
    longest: int = 1 << 20
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    holder: subprocess.Popen[str] | None = None

    def prompt(self, tokens: int) -> list[int]:
        # No shared beginning: nothing of it may come from the prefix cache.
        return [self.draw.randrange(10, 100_000) for _ in range(tokens)]

    def release(self) -> None:
        if self.holder is not None:
            self.holder.kill()
            self.holder.wait()
            self.holder = None


def ready(bench: Bench, _: float) -> dict[str, Any]:
    """Until ready, whatever healing needs; then the account beside what was read."""
    took = bench.served.until_ready(bench.boot_seconds * 4)
    bench.served.read()
    plan = bench.served.get("/plan")[1]
    compared = account.compare(plan, bench.served.readings)
    free = round(bench.memory.free() / GIB, 2)
    return {"seconds": took, "account": compared, "free_gib": free, "torch_gib": bench.served.torch()}


def _parallel(bench: Bench, prompts: list[list[int]], seconds: float) -> dict[str, Any]:
    answers: list[bool] = []
    began = time.monotonic()

    def one(tokens: list[int]) -> None:
        answers.append(bench.served.generate(tokens, NEW_TOKENS, seconds))

    threads = [threading.Thread(target=one, args=(tokens,), daemon=True) for tokens in prompts]
    for thread in threads:
        thread.start()
    bench.served.join(threads, seconds)
    least = bench.memory.least(began)
    return {
        "requests": len(prompts),
        "tokens_each": len(prompts[0]),
        "answered": sum(answers),
        "seconds": round(time.monotonic() - began, 2),
        "least_free_gib": None if least is None else round(least / GIB, 2),
        "torch_gib": bench.served.torch(),
    }


def long(bench: Bench, tokens: float) -> dict[str, Any]:
    """Eight prompts of ``tokens`` at once; 0: as long as context and pool let all eight be."""
    plan = bench.served.get("/plan")[1] or {}
    limit = min(plan["context_length"], plan["max_total_tokens"] // 8) - 2 * NEW_TOKENS - 64
    size = min(int(tokens) or limit, limit, bench.longest)
    return _parallel(bench, [bench.prompt(size) for _ in range(8)], 600)


def heal_long(bench: Bench, tokens: float) -> dict[str, Any]:
    """Long prompts that the engine dies of, until it has been healed and answers them."""
    rounds = []
    for _ in range(4):
        seen = long(bench, tokens)
        rounds.append(f"{seen['answered']}/{seen['requests']}")
        if seen["answered"] == seen["requests"]:
            break
        bench.served.until(lambda: not bench.served.is_ready, 60, "not ready any more")
        bench.served.until_ready(bench.boot_seconds * 4)
    return {**seen, "rounds": rounds}


def chunks(bench: Bench, count: float) -> dict[str, Any]:
    """``count`` prompts of exactly one prefill chunk."""
    size = int((bench.served.get("/plan")[1] or {}).get("chunked_prefill_size") or 4096)
    return _parallel(bench, [bench.prompt(size) for _ in range(int(count))], 240)


def mixed(bench: Bench, seconds: float) -> dict[str, Any]:
    """Short and long requests from 24 clients for ``seconds``."""
    ending = time.monotonic() + seconds
    began, answers = time.monotonic(), list[bool]()

    def client(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < ending:
            size = draw.choice((16, 200, 200, 1000, 4000, 12000))
            tokens = [draw.randrange(10, 100_000) for _ in range(size)]
            answers.append(bench.served.generate(tokens, draw.choice((4, 32, 128)), 120))

    threads = [threading.Thread(target=client, args=(seed,), daemon=True) for seed in range(24)]
    for thread in threads:
        thread.start()
    bench.served.join(threads, seconds + 120)
    least = bench.memory.least(began)
    return {
        "requests": len(answers),
        "answered": sum(answers),
        "seconds": round(time.monotonic() - began, 2),
        "least_free_gib": None if least is None else round(least / GIB, 2),
        "torch_gib": bench.served.torch(),
    }


def _hurt(bench: Bench, sig: signal.Signals, rank: int) -> dict[str, Any]:
    served = bench.served
    boots = len(served.history()["boots"])
    old = {process.pid: process.create_time() for process in served.tree()}
    at = time.monotonic()
    served.scheduler(rank).send_signal(sig)
    seen = served.until(lambda: not served.is_ready, 120, "not ready any more")
    served.until(lambda: len(served.history()["boots"]) > boots, 180, "the next start")
    respawn = round(time.monotonic() - at, 2)
    left = [process.pid for process in served.tree() if old.get(process.pid) == process.create_time()]
    back = bench.memory.back_after(at)  # on every GPU: the least free one is what is sampled
    served.until_ready(bench.boot_seconds * 3)
    return {
        "signal": sig.name,
        "rank": rank,
        "to_not_ready": seen,
        "to_memory_back": back,
        "to_respawn": respawn,
        "to_ready": round(time.monotonic() - at, 2),
        "old_processes_left": left,
    }


def kill(bench: Bench, rank: float) -> dict[str, Any]:
    """SIGKILL a scheduler while it serves."""
    return _hurt(bench, signal.SIGKILL, int(rank))


def stop(bench: Bench, rank: float) -> dict[str, Any]:
    """SIGSTOP a scheduler while it serves."""
    return _hurt(bench, signal.SIGSTOP, int(rank))


def kill_loading(bench: Bench, rank: float) -> dict[str, Any]:
    """SIGKILL a rank while weights load, at the first start."""
    served = bench.served
    served.until(lambda: "Load weight begin" in served.log_path.read_text(errors="replace"), 240, "loading", 0.01)
    return _hurt(bench, signal.SIGKILL, int(rank))


def hold(bench: Bench, gib: float) -> dict[str, Any]:
    """Another process takes all but ``gib`` of a GPU while the engine imports; it lets go 10 s after the engine
    died of it."""
    served = bench.served
    served.until(lambda: "engine started" in served.log_path.read_text(errors="replace"), 60, "the first start")
    command = [sys.executable, str(Path(__file__).with_name("hold_memory.py")), str(gib)]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": str(bench.gpus[-1])}
    bench.holder = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    assert bench.holder.stdout is not None
    held = int(bench.holder.stdout.readline() or 0)
    died = served.until(lambda: bool(served.history()["post_mortems"]), 240, "the end of the first start")
    at = time.monotonic()
    time.sleep(10)
    boots = len(served.history()["boots"])
    bench.release()
    freed = time.monotonic()
    served.until(lambda: len(served.history()["boots"]) > boots, 150, "the next start")
    return {
        "held_gib": round(held / GIB, 1),
        "seconds_to_the_end": died,
        "boots_while_held": boots,
        "released_to_respawn": round(time.monotonic() - freed, 2),
        "seconds_held_after_the_end": round(freed - at, 1),
    }


def stable(bench: Bench, _: float) -> dict[str, Any]:
    """Until what was learned is written down."""
    folder = bench.served.state / "known-good"
    took = bench.served.until(lambda: any(folder.glob("*.json")), 90, "known-good settings")
    return {"seconds": took}


def again(bench: Bench, _: float) -> dict[str, Any]:
    """A second boot of the whole supervisor: it must start right at once."""
    ended = bench.served.terminate()
    boots = len(bench.served.history()["boots"])
    mortems = len(bench.served.history()["post_mortems"])
    bench.served = bench.start()
    took = bench.served.until_ready(bench.boot_seconds * 3)
    after = bench.served.history()
    if len(after["post_mortems"]) > mortems:
        raise Failed("the second boot did not start right at once")
    return {
        "first_ended": ended,
        "seconds": took,
        "starts": len(after["boots"]) - boots,
        "ends": len(after["post_mortems"]) - mortems,
        "fraction": (bench.served.get("/plan")[1] or {}).get("mem_fraction_static"),
    }


STEPS: dict[str, Callable[[Bench, float], dict[str, Any]]] = {
    "ready": ready,
    "long": long,
    "heal_long": heal_long,
    "chunks": chunks,
    "mixed": mixed,
    "kill": kill,
    "stop": stop,
    "kill_loading": kill_loading,
    "hold": hold,
    "stable": stable,
    "again": again,
}

__all__ = ["STEPS", "Bench", "Failed"]
