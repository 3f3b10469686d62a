"""`relaunch bench`: a load at several concurrencies against a running server, and what it did."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import loads
from .generator import Generator, Progress
from .loads import Load
from .meter import PowerMeter, engine_work, gpu_watts
from .target import Target

CONCURRENCY = (1, 8, 64)
SECONDS = 30.0
# Requests of one concurrency, however quick the server is.
MOST_REQUESTS = 20000
# Requests by client that a level has at least: fewer say nothing of a steady state.
LEAST_ROUNDS = 2

# Of a level: its concurrency, requests that are done, and all of them (0 while that is not known).
OnProgress = Callable[[int, int, int], object]


@dataclass(frozen=True)
class Question:
    """What is measured. ``seconds``: about how long each concurrency is held; ``seed``: of the prompts, None: new ones
    each time, of which no server has any in its cache."""

    load: Load
    concurrency: tuple[int, ...] = CONCURRENCY
    seconds: float = SECONDS
    seed: int | None = None


def measure(
    target: Target,
    generator: Generator,
    question: Question,
    on_progress: OnProgress = lambda level, done, of: None,
) -> dict[str, Any]:
    """Return the measurement document. Raises Stop (69) when the server answers none of the requests."""
    load = loads.fitted(question.load, target.context, embedding=target.embedding)
    seed = question.seed if question.seed is not None else secrets.randbelow(1 << 30)
    levels = []
    for number, concurrency in enumerate(question.concurrency):
        on_progress(concurrency, 0, 0)
        words = _common(target, concurrency)

        def run(requests: int, prompts: int, shown: Progress, words: list[str] = words) -> dict[str, Any]:
            sized = loads.arguments(load, requests, target.context)
            return generator.run([*words, "--seed", str(seed + prompts), *sized], shown)

        # The first requests compile, fill and warm; they also say how many make up the time that was asked for.
        first = run(concurrency, 2 * number, lambda done, of: None)
        rate = first["completed"] / first["duration"] if first["duration"] else 0.0
        requests = min(max(int(rate * question.seconds), LEAST_ROUNDS * concurrency), MOST_REQUESTS)
        before = target.scrape()
        with PowerMeter(gpu_watts if target.own else list) as power:
            found = run(requests, 2 * number + 1, partial(on_progress, concurrency))
        found["first_error"] = target.without_address(found["first_error"] or "") or None
        levels.append(summary(concurrency, found, engine_work(before, target.scrape()), power.watts))
    return {
        "load": {**load.document(), "seed": seed, "seconds": question.seconds},
        "generator": {"name": "sglang.benchmark.serving", "own_cores": len(generator.own_cores)},
        "levels": levels,
    }


def _common(target: Target, concurrency: int) -> list[str]:
    """The benchmark's words that do not depend on the load."""
    if target.embedding:
        backend = ["vllm-embedding"]
    elif target.sglang:
        # Token ids: lengths are exact, and no text is tokenized on the engine's cores.
        backend = ["sglang", "--tokenize-prompt", "--cache-report"]
    else:
        backend = ["vllm"]
    return [
        *("--backend", *backend, "--base-url", target.url, "--model", target.model),
        *("--max-concurrency", str(concurrency), "--warmup-requests", "0", "--ready-check-timeout-sec", "0"),
    ]


def summary(concurrency: int, found: dict[str, Any], work: dict[str, Any], watts: float | None) -> dict[str, Any]:
    """Return one level of the document from the benchmark's result, the engine's counters and the GPUs' power.
    Latencies in seconds, rates in tokens per second."""
    prompt = work["prompt_tokens"] or found["total_input_tokens"]
    tokens_per_second = (prompt + found["total_output_tokens"]) / found["duration"]
    cached = found["cached_tokens"] / prompt if prompt and "cached_tokens" in found else work["cached_share"]
    return {
        "concurrency": concurrency,
        "requests": found["requests"],
        "errors": found["errors"],
        "first_error": found["first_error"],
        "seconds": round(found["duration"], 3),
        "requests_per_second": round(found["request_throughput"], 4),
        "output_tokens_per_second": round(found["output_throughput"], 2),
        "prompt_tokens_per_second": round(prompt / found["duration"], 2),
        "first_token_seconds": _percentiles(found, "ttft"),
        "token_seconds": _percentiles(found, "tpot"),
        "request_seconds": _percentiles(found, "e2e_latency"),
        "cached_share": None if cached is None else round(cached, 4),
        "accepted_drafts": work["accepted_drafts"],
        "watts": None if watts is None else round(watts, 1),
        "tokens_per_joule": round(tokens_per_second / watts, 3) if watts else None,
    }


def _percentiles(found: dict[str, Any], name: str) -> dict[str, float]:
    rows = {"p50": f"median_{name}_ms", "p95": f"p95_{name}_ms", "p99": f"p99_{name}_ms"}
    return {short: round(found[key] / 1000, 6) for short, key in rows.items()}


def parse_concurrency(text: str) -> tuple[int, ...]:
    """Return ``1,8,64`` as numbers. Raises ValueError."""
    numbers = tuple(int(word) for word in text.split(","))
    if not numbers or any(not 1 <= number <= 4096 for number in numbers):
        raise ValueError(text)
    return numbers


def figure(levels: Sequence[dict[str, Any]]) -> str:
    """Return the name of the rate that says most of a measurement: of the answers, or of the prompts where there are
    none."""
    answered = any(level["output_tokens_per_second"] for level in levels)
    return "output_tokens_per_second" if answered else "prompt_tokens_per_second"
