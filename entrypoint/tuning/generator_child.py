"""Runs in a process of its own: the engine's benchmark (`python -m sglang.benchmark.serving`), one run a line.

Its imports take ten seconds and more, so that one process does all runs of a measurement. Reads JSON lists of the
benchmark's arguments from stdin and answers each with one JSON line: its result, or ``error``. What the benchmark
itself prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from sglang.benchmark import serving

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(serving, json.loads(line))), file=answers, flush=True)


def _run(serving: Any, words: list[str]) -> dict[str, Any]:
    """One run, as its command line would do it."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        written = Path(folder) / "result.jsonl"
        sys.argv = ["serving", *words, "--output-file", str(written), "--output-details"]
        try:
            serving.cli_main()
            found = json.loads(written.read_text(encoding="utf-8").splitlines()[-1])
        except (Exception, SystemExit) as error:
            return {"error": f"{type(error).__name__}: {error}"}
    return {**{k: v for k, v in found.items() if not isinstance(v, list | dict)}, **_of_requests(found)}


def _of_requests(found: dict[str, Any]) -> dict[str, Any]:
    """What the lists of the result say, without any text of a prompt or an answer."""
    errors = [text.strip().splitlines()[-1][:200] for text in found["errors"] if text]
    cached = (found.get("cache_report") or {}).get("total_cached_tokens")
    return {"requests": len(found["errors"]), "errors": len(errors), "first_error": next(iter(errors), None)} | (
        {} if cached is None else {"cached_tokens": cached}
    )


if __name__ == "__main__":
    main()
