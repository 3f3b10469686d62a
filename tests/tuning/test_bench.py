"""The measurement: how many requests are sent, what is made of the benchmark's result, what fits a context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from entrypoint.engine.scrape import Scrape
from entrypoint.errors import Stop
from entrypoint.tuning import bench, loads
from entrypoint.tuning.generator import own_cores
from entrypoint.tuning.meter import PowerMeter, engine_work
from entrypoint.tuning.target import Target


class Server(Target):
    """A server whose counters grow with each scrape."""

    scrapes = 0

    def scrape(self) -> Scrape:
        Server.scrapes += 1
        return numbers(prompt_tokens_total=100.0 * self.scrapes, cached_tokens_total=25.0 * self.scrapes)


def numbers(**values: float) -> Scrape:
    return Scrape(0.0, {(name, ""): value for name, value in values.items()})


def server(**changed: Any) -> Target:
    known = {"url": "http://x", "http": None, "api_key": None, "model": "m", "context": 512, "plan": None, "info": {}}
    return Server(**{**known, "embedding": False, "sglang": True, "own": False, **changed})


class Benchmark:
    """Answers ten requests a second, and remembers what it was asked."""

    own_cores: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def run(self, words: Sequence[str], on_progress: Callable[[int, int], object]) -> dict[str, Any]:
        self.asked.append(list(words))
        sent = int(self.option("--num-prompts"))
        on_progress(sent, sent)
        latencies = {
            f"{p}_{name}_ms": 10.0 for p in ("median", "p95", "p99") for name in ("ttft", "tpot", "e2e_latency")
        }
        return {
            **latencies,
            "requests": sent,
            "completed": sent,
            "errors": 0,
            "first_error": None,
            "duration": sent / 10,
            "request_throughput": 10.0,
            "output_throughput": 80.0,
            "total_input_tokens": 16 * sent,
            "total_output_tokens": 8 * sent,
        }

    def option(self, name: str) -> str:
        return self.asked[-1][self.asked[-1].index(name) + 1]


def test_each_concurrency_is_held_for_about_the_time_that_was_asked_for() -> None:
    benchmark = Benchmark()
    question = bench.Question(loads.named("chat"), (1, 64), seconds=3.0)
    found = bench.measure(server(), benchmark, question)  # type: ignore[arg-type]
    assert [level["requests"] for level in found["levels"]] == [30, 128]
    assert found["levels"][0]["seconds"] == 3.0


def test_no_two_runs_send_the_same_prompts_and_a_seed_repeats_them() -> None:
    def seeds(seed: int | None) -> list[str]:
        benchmark = Benchmark()
        bench.measure(server(), benchmark, bench.Question(loads.named("chat"), (1, 8), 1.0, seed))  # type: ignore[arg-type]
        return [words[words.index("--seed") + 1] for words in benchmark.asked]

    assert len(set(seeds(None))) == 4
    assert seeds(7) == seeds(7) == ["7", "8", "9", "10"]


def test_the_engines_own_counters_say_what_was_cached() -> None:
    question = bench.Question(loads.named("chat"), (1,), 1.0)
    found = bench.measure(server(), Benchmark(), question)  # type: ignore[arg-type]
    assert found["levels"][0]["cached_share"] == 0.25


@pytest.mark.parametrize("name", ["chat", "agent", "long"])
@pytest.mark.parametrize("context", [64, 512, 32768])
def test_a_load_fits_the_context(name: str, context: int) -> None:
    fitted = loads.fitted(loads.named(name), context, embedding=False)
    assert fitted.shared_tokens + fitted.prompt_tokens + fitted.output_tokens <= context


def test_a_load_is_a_name_two_numbers_or_a_file(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.touch()
    assert loads.named("300/20").prompt_tokens == 300 and loads.named("300/20").output_tokens == 20
    assert str(own) in loads.arguments(loads.named(str(own)), 5, None)
    with pytest.raises(Stop, match="--load caht is no file"):
        loads.named("caht")


def test_drafts_that_were_accepted_are_what_a_verification_gave_beyond_its_own_token() -> None:
    work = engine_work(numbers(), numbers(generation_tokens_total=300.0, spec_verify_calls_total=100.0))
    assert work["accepted_drafts"] == 2.0 and work["cached_share"] is None
    assert engine_work(numbers(), numbers(generation_tokens_total=300.0))["accepted_drafts"] is None


def test_power_is_the_mean_of_all_gpus_together() -> None:
    with PowerMeter(lambda: [100.0, 50.0]) as power:
        pass
    assert power.watts == 150.0
    with PowerMeter(list) as power:
        pass
    assert power.watts is None


def test_only_a_big_host_gives_the_generator_cores_of_its_own() -> None:
    assert own_cores(set(range(2))) == set()
    assert own_cores(set(range(64))) == {60, 61, 62, 63}
