"""`relaunch tune` with a fake tree in sglang's place, whose speed the arms choose by FAKE_ENGINE, and a fake benchmark.

Arguments: the arms. Prints the document.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from entrypoint.tuning import arms, trial, tune

FAKE = str(Path(__file__).parents[1] / "engine" / "fake_engine.py")


class Generator:
    own_cores: frozenset[int] = frozenset()

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, words: Sequence[str], on_progress: Callable[[int, int], object]) -> dict[str, Any]:
        url = words[words.index("--base-url") + 1]
        speed = httpx.get(f"{url}/model_info", trust_env=False).json()["speed"]
        latencies = {
            f"{p}_{name}_ms": 1.0 for p in ("median", "p95", "p99") for name in ("ttft", "tpot", "e2e_latency")
        }
        return {
            **latencies,
            "requests": 8,
            "completed": 8,
            "errors": 0,
            "first_error": None,
            "duration": 1 / speed,
            "request_throughput": 8.0 * speed,
            "output_throughput": 0.0,
            "total_input_tokens": 100,
            "total_output_tokens": 0,
        }


def main() -> None:
    trial.COMMAND = (
        "-c",
        f"import sys; from entrypoint.engine import command; command.LAUNCHER = ({FAKE!r},); "
        "from entrypoint.tuning.trial_child import main; sys.exit(main())",
    )
    tune.Generator = Generator  # type: ignore[assignment,misc]
    options = tune.Options("latency", 1.0, own=tuple(map(arms.parse, sys.argv[1:])), only=True)
    found = tune.run(os.environ, options, lambda *_: None, lambda text: print(text, file=sys.stderr))
    print(json.dumps({name: found[name] for name in ("arms", "winner", "kept")}))


if __name__ == "__main__":
    main()
