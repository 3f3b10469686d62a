"""The load generator: the engine's own benchmark in a child process, away from the engine's cores where it can be.

Compared with guidellm and aiperf: both measure the same quantities and would add 22 and 60 packages to the
lock; this one is installed with the engine, and published numbers of sglang come from it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.schema import PREFIX
from ..errors import EXIT_UNAVAILABLE, Stop
from ..host.parent_death import tied_to_parent

# tqdm's ``12/64`` on stderr.
_DONE = re.compile(rb"(\d+)/(\d+) \[")
# On a host of this many cores and more, the generator has the last of them to itself, as far as it goes.
ENOUGH_CORES = 16
OWN_CORES = 4

Progress = Callable[[int, int], object]


class Generator:
    """One child that does the runs of a measurement, one after the other. A context manager; raises Stop (69) where no
    engine is installed, or when the benchmark cannot be run."""

    def __init__(self, environ: Mapping[str, str], api_key: str | None) -> None:
        if importlib.util.find_spec("sglang") is None:
            raise Stop(
                "image_mismatch",
                "the benchmark belongs to the engine (sglang), which is not installed beside relaunch",
                "./relaunch serve installs it; or pip install 'relaunch[engine]'",
            )
        kept = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
        kept |= {"PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "", "NO_PROXY": "*", "no_proxy": "*"}
        # The child's only way to a key; its command line is seen by everybody.
        kept |= {"OPENAI_API_KEY": api_key} if api_key else {}
        self._on_progress: Progress = lambda done, of: None
        self._last = b""
        self.own_cores = own_cores(os.sched_getaffinity(0))
        self._child = subprocess.Popen(
            tied_to_parent([sys.executable, "-P", str(Path(__file__).with_name("generator_child.py"))]),
            env=kept,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        if self.own_cores:
            os.sched_setaffinity(self._child.pid, self.own_cores)
        self._reader = threading.Thread(target=self._read_progress, name="generator", daemon=True)
        self._reader.start()
        self._ready = False

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.wait()
        self._reader.join()
        for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
            if pipe is not None:
                pipe.close()

    def run(self, words: Sequence[str], on_progress: Progress = lambda done, of: None) -> dict[str, Any]:
        """Do one run of the benchmark and return its numbers (`generator_child.py`). Raises Stop (69) when it fails."""
        if not self._ready:
            self._answer()
            self._ready = True
        self._on_progress = on_progress
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(list(words)).encode() + b"\n")
            self._child.stdin.flush()
        except OSError:
            raise self._failed("it ended") from None
        found = self._answer()
        if "error" in found:
            raise self._failed(str(found["error"]))
        return found

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise self._failed("it ended")
        return dict(json.loads(line))

    def _failed(self, why: str) -> Stop:
        said = self._last.decode("utf-8", "replace").strip() if why == "it ended" else ""
        text = f"the benchmark failed: {why}" + (f": {said}" if said else "")
        return Stop("bench_failed", text[:500], "see whether the server answers: relaunch check", exit_code=69)

    def _read_progress(self) -> None:
        stream = self._child.stderr
        assert stream is not None
        for chunk in iter(lambda: stream.read1(1 << 16), b""):  # type: ignore[attr-defined]
            if found := _DONE.findall(chunk):
                self._on_progress(int(found[-1][0]), int(found[-1][1]))
            self._last = (chunk.strip().rsplit(b"\n", 1)[-1] or self._last)[-300:]


def own_cores(allowed: set[int]) -> set[int]:
    """Return the cores for the generator alone, empty where there are too few to take any from the engine."""
    return set(sorted(allowed)[-OWN_CORES:]) if len(allowed) >= ENOUGH_CORES else set()


def unreachable(url: str, why: str) -> Stop:
    """Return the Stop for a server that does not answer (exit 69)."""
    return Stop(
        "not_running",
        f"nobody answers on {url}: {why}",
        "start ./relaunch serve, or name a server with --url",
        exit_code=EXIT_UNAVAILABLE,
    )
