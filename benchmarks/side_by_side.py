"""Side by side in one run: the engine alone with its own defaults, and `relaunch serve` for each goal.

    .venv/bin/python -P benchmarks/side_by_side.py --out DIR [--lean] [--rounds 3] [--report]

Dummy weights of the geometries in tests/plan/configs, so that nothing is downloaded; the same kernels, the same closed
loop of clients, arms in turn round by round. Every load is written when it is done and what is there is not measured
again: a run that was cut goes on with the same command. Whatever it started is ended, however it ends. ``--report``
prints the table of what is there and starts nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from entrypoint.host import nvml

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "tests/plan/configs"
# Dense GQA, MoE with GQA, MLA with sparse attention (8 of its layers), sliding window.
MODELS = ("llama-8b", "qwen3-30b-a3b", "glm-5-8-layers", "gpt-oss-20b")
ENGINE, ARMS = "engine", ("engine", "balanced", "latency", "throughput")
DUMMY = "--load-format dummy --skip-tokenizer-init"
# Kernels that compile in seconds, for a machine that is lent by the minute; for both sides alike.
LEAN = "--sampling-backend pytorch --disable-prefill-cuda-graph"
LEAN_ATTENTION = {"glm-5-8-layers": "--dsa-prefill-backend flashmla_sparse --dsa-decode-backend flashmla_sparse"}
READY_SECONDS, LOAD_SECONDS, END_SECONDS = 900, 600, 60
# One client of so many reads its answer as a stream and times its tokens: all of them would measure this script.
STREAMED = 16
# The bar: relaunch's share of the engine's number, where more is better.
WORST_CELL, MEAN_OF_CELLS = 0.98, 1.03


@dataclass(frozen=True)
class Load:
    """A closed loop: ``clients`` send ``total`` prompts of ``tokens_in`` random tokens, each answered with
    ``tokens_out``."""

    tokens_in: int
    tokens_out: int
    clients: int
    total: int

    def scaled(self, share: float) -> Load:
        """The same requests from fewer clients, for a small box."""
        clients = max(1, int(self.clients * share))
        return Load(self.tokens_in, self.tokens_out, clients, max(clients, int(self.total * share)))


LOADS = {
    "one": Load(1024, 256, 1, 4),
    "chat": Load(1024, 256, 256, 768),
    "long": Load(16000, 64, 32, 96),
    "pressure": Load(4096, 1024, 256, 384),
}


@dataclass
class Times:
    """What the clients of one load saw, in seconds."""

    done: int = 0
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    def summary(self, load: Load, seconds: float) -> dict[str, Any]:
        """The numbers of one load as they are kept."""

        def middle(values: list[float]) -> float | None:
            return round(statistics.median(values), 5) if values else None

        return {
            "seconds": round(seconds, 2),
            "ok": self.done,
            "bad": len(self.bad),
            "why": sorted(set(self.bad))[:5],
            "in_per_second": round(self.done * load.tokens_in / seconds, 1),
            "out_per_second": round(self.done * load.tokens_out / seconds, 1),
            "first_token": middle(self.first),
            "per_token": middle(self.between),
            "answer": middle(self.whole),
        }


async def ask(client: httpx.AsyncClient, url: str, load: Load, vocabulary: int, times: Times, number: int) -> None:
    """One request; an answer that is not whole counts as bad."""
    body = {
        "input_ids": [random.randrange(10, vocabulary) for _ in range(load.tokens_in)],
        "sampling_params": {"max_new_tokens": load.tokens_out, "ignore_eos": True, "temperature": 1.0},
        "stream": number % STREAMED == 0,
    }
    began, first, last = time.perf_counter(), None, 0.0
    try:
        async with client.stream("POST", f"{url}/generate", json=body) as answer:
            if answer.status_code != 200:
                times.bad.append(f"HTTP {answer.status_code}")
                return
            async for line in answer.aiter_lines():
                if "output_ids" in line:
                    last = time.perf_counter()
                    first = first or last
    except httpx.HTTPError as error:
        times.bad.append(type(error).__name__)
        return
    if first is None:
        times.bad.append("no tokens")
        return
    times.done += 1
    times.whole.append(last - began)
    if body["stream"]:
        times.first.append(first - began)
        times.between.append((last - first) / max(1, load.tokens_out - 1))


async def drive(url: str, load: Load, vocabulary: int) -> dict[str, Any]:
    """The whole closed loop."""
    times, numbers, began = Times(), iter(range(load.total)), time.perf_counter()
    limits = httpx.Limits(max_connections=load.clients)
    async with httpx.AsyncClient(timeout=LOAD_SECONDS, limits=limits) as client:

        async def one() -> None:
            for number in numbers:
                await ask(client, url, load, vocabulary, times, number)

        await asyncio.wait_for(asyncio.gather(*(one() for _ in range(load.clients))), LOAD_SECONDS)
    return times.summary(load, time.perf_counter() - began)


def free_port() -> int:
    """A port of the loopback that nothing listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def command(arm: str, model: Path, ports: tuple[int, int], args: str, work: Path) -> tuple[list[str], dict[str, str]]:
    """The command line of one arm and what its environment has besides."""
    port, control = ports
    if arm == ENGINE:
        where = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
        return [sys.executable, "-P", "-m", "sglang.launch_server", *where, *args.split()], {}
    return [sys.executable, "-P", "-m", "entrypoint", "serve"], {
        "PYTHONPATH": str(ROOT),
        "RELAUNCH_MODEL": str(model),
        "RELAUNCH_GOAL": arm,
        "RELAUNCH_PORT": str(port),
        "RELAUNCH_CONTROL_PORT": str(control),
        "RELAUNCH_STATE_DIR": str(work / f"state-{port}"),
        "RELAUNCH_CACHE_DIR": str(work / "cache"),
        "RELAUNCH_DRAIN_TIMEOUT": "5s",
        "RELAUNCH_ENGINE_ARGS": args,
    }


def end(process: subprocess.Popen[bytes]) -> None:
    """The process and all that came of it, first by request."""
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    for one in below:
        with contextlib.suppress(psutil.Error):
            one.kill()
    process.kill()
    process.wait()
    psutil.wait_procs(below, END_SECONDS)


def wait_for_memory(free: Mapping[int, int]) -> None:
    """Until the GPUs have given back what the last arm took, within a gibibyte."""
    for _ in range(END_SECONDS * 2):
        now = nvml.free_bytes(list(free))
        if all(now.get(index, 0) >= had - (1 << 30) for index, had in free.items()):
            return
        time.sleep(0.5)


@contextlib.contextmanager
def running(arm: str, model: Path, args: str, out: Path) -> Iterator[str | None]:
    """The arm's address once it answers, None where it never does; ended on the way out."""
    free = nvml.free_bytes(range(64))
    ports = free_port(), free_port()
    words, environment = command(arm, model, ports, args, out / "work")
    log = out / f"{model.name}-{arm}.log"
    with log.open("ab") as sink:
        process = subprocess.Popen(words, env={**os.environ, **environment}, stdout=sink, stderr=sink)
        try:
            ready = f"http://127.0.0.1:{ports[0]}/health" if arm == ENGINE else f"http://127.0.0.1:{ports[1]}/readyz"
            yield f"http://127.0.0.1:{ports[0]}" if answers(ready, process) else None
        finally:
            end(process)
            wait_for_memory(free)


def answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Whether the process is ready in time."""
    limit = time.monotonic() + READY_SECONDS
    while time.monotonic() < limit and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return True
        time.sleep(0.5)
    return False


def measure(options: argparse.Namespace, results: dict[str, Any], model: str, arm: str, turn: int) -> None:
    """One arm of one round: every load that is not there yet."""
    place = results.setdefault(model, {}).setdefault(arm, {}).setdefault(str(turn), {})
    missing = [name for name in options.loads if name not in place]
    if not missing:
        return
    folder = options.out / "work" / model
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text((CONFIGS / f"{model}.json").read_text())
    vocabulary = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    lean = f"{LEAN} {LEAN_ATTENTION.get(model, '--attention-backend triton')}" if options.lean else ""
    with running(arm, folder, f"{DUMMY} {lean} {options.engine_args}", options.out) as url:
        for name in missing if url else ():
            load = LOADS[name].scaled(options.clients)
            # Kernels compile on first use: the load's own shapes once, unmeasured.
            asyncio.run(drive(str(url), load.scaled(0.1), vocabulary))
            place[name] = asyncio.run(drive(str(url), load, vocabulary))
            (options.out / "results.json").write_text(json.dumps(results, indent=1))
            print(model, arm, turn, name, place[name], flush=True)
    if url is None:
        print(f"{model} {arm}: not ready; see {options.out / f'{model}-{arm}.log'}", flush=True)


def cell(rounds: Mapping[str, Any], load: str, name: str) -> float | None:
    """The median over the rounds."""
    found = [one[load][name] for one in rounds.values() if one.get(load, {}).get(name)]
    return statistics.median(found) if found else None


# (kept name, heading, factor for the table, whether less is better)
SHOWN = (
    ("out_per_second", "tokens/s", 1.0, False),
    ("first_token", "first token, s", 1.0, True),
    ("per_token", "ms a token", 1000.0, True),
)


def report(results: Mapping[str, Any], loads: list[str]) -> str:
    """A Markdown table of medians with each goal's share of the engine's number (above 1: better), and the verdicts."""
    arms = [arm for arm in ARMS if any(arm in found for found in results.values())]
    lines = ["| geometry, load | number | " + " | ".join(arms) + " |", "|---|---|" + "---|" * len(arms)]
    shares: dict[str, list[float]] = {arm: [] for arm in arms if arm != ENGINE}
    for model, found in results.items():
        for load in loads:
            for name, heading, factor, less in SHOWN:
                own, words = cell(found.get(ENGINE, {}), load, name), []
                for arm in arms:
                    value = cell(found.get(arm, {}), load, name)
                    text = "-" if value is None else f"{value * factor:,.1f}"
                    if arm != ENGINE and value and own:
                        share = own / value if less else value / own
                        shares[arm].append(share)
                        text += f" ({share:.2f}x)"
                    words.append(text)
                lines.append(f"| {model}, {load} | {heading} | " + " | ".join(words) + " |")
    for arm, values in shares.items():
        if values:
            mean = math.exp(statistics.fmean(map(math.log, values)))
            held = "holds" if min(values) >= WORST_CELL and mean > MEAN_OF_CELLS else "does not hold"
            lines += ["", f"{arm}: worst cell {min(values):.2f}x, geometric mean {mean:.3f}x; the bar {held}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=float, default=1.0, help="share of the clients, for a small box")
    parser.add_argument("--lean", action="store_true")
    parser.add_argument("--engine-args", default="", help="flags for both sides")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    models, arms, options.loads = (text.split(",") for text in (options.models, options.arms, options.loads))
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "results.json"
    results: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not options.report:
        for turn in range(options.rounds):
            for model in models:
                for arm in arms:
                    measure(options, results, model, arm, turn)
    print(report(results, options.loads))


if __name__ == "__main__":
    main()
