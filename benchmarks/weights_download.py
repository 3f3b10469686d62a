"""Fetch, hash and prove against `hf download` (which hashes nothing), from a loopback hub, in one run.

    python -P benchmarks/weights_download.py [--megabytes 1000] [--rounds 3] [--dir /tmp/relaunch-fetch]

The hub is a process of its own that sends plain HTTP from the page cache. Everything is removed at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from entrypoint.config import settings
from entrypoint.weights import prepare

REPO = "bench/model"
TESTS = Path(__file__).resolve().parents[1] / "tests" / "weights"
SERVE = (
    "import sys; sys.path.insert(0, sys.argv[1])\nfrom pathlib import Path\nfrom fakehub import FakeHub\n"
    "with FakeHub(Path(sys.argv[2])) as hub:\n"
    " print(hub.url, hub.repos['bench/model'].sha, flush=True)\n sys.stdin.read()"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path("/tmp/relaunch-fetch"))
    options = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from weights_kit import checkpoint

    options.dir.mkdir(parents=True)
    hub = None
    try:
        shards = 8
        checkpoint(options.dir / "source" / REPO, shards=shards, rows=options.megabytes * 1024 // shards)
        hub = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVE, str(TESTS), str(options.dir / "source")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert hub.stdout is not None
        url, commit = hub.stdout.readline().split()

        def environ(home: Path) -> dict[str, str]:
            return {
                **os.environ,
                "HOME": str(options.dir),
                "HF_HOME": str(home),
                "HF_ENDPOINT": url,
                "HF_HUB_DISABLE_UPDATE_CHECK": "1",
                "HF_HUB_DISABLE_TELEMETRY": "1",
            }

        def ours(home: Path) -> None:
            given = {"RELAUNCH_MODEL": REPO, "RELAUNCH_REVISION": commit, "RELAUNCH_STATE_DIR": str(home / "state")}
            snapshot = asyncio.run(prepare(settings.load(given, {}), environ=environ(home)))
            assert snapshot.level == "full"

        def theirs(home: Path) -> None:
            command = [str(Path(sys.executable).parent / "hf"), "download", REPO, "--revision", commit]
            subprocess.run(command, env=environ(home), check=True, capture_output=True)

        times: dict[str, list[float]] = {"relaunch": [], "hf": []}
        for _ in range(options.rounds):
            for name, method in (("relaunch", ours), ("hf", theirs)):
                home = options.dir / "home"
                begin = time.perf_counter()
                method(home)
                times[name].append(time.perf_counter() - begin)
                shutil.rmtree(home)
        medians = {name: statistics.median(values) for name, values in times.items()}
        print(
            json.dumps(
                {
                    "megabytes": options.megabytes,
                    "load": os.getloadavg()[0],
                    "seconds": times,
                    "hf_over_relaunch": round(medians["hf"] / medians["relaunch"], 2),
                },
                indent=1,
            )
        )
    finally:
        if hub is not None:
            hub.communicate("")
        shutil.rmtree(options.dir)


if __name__ == "__main__":
    main()
