"""Full verify against openssl, `hf cache verify` and sglang's own verifier, on the same files, in one run.

    python -P benchmarks/weights_verify.py [--gigabytes 4.3] [--rounds 3] [--dir /tmp/relaunch-bench] [--cold]

Each round runs every method once, in turn; the ratios are of medians. ``--cold`` (root) drops the page cache before
each. `hf cache verify` asks a loopback hub for the listing. Everything is removed at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

from entrypoint.weights.manifest import Entry, Manifest
from entrypoint.weights.source import Located
from entrypoint.weights.verify import Policy, verify

REPO, COMMIT = "bench/model", "c" * 40
FILES = 8


def make(storage: Path, total: int) -> tuple[Path, dict[str, tuple[int, str]]]:
    """A snapshot in the hub cache's layout: FILES shards of one random tensor each."""
    root = storage / "snapshots" / COMMIT
    root.mkdir(parents=True)
    (storage / "blobs").mkdir()
    files, size = {}, total // FILES
    for n in range(FILES):
        header = json.dumps({f"t{n}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        header += b" " * (-len(header) % 8)
        digest, temporary = hashlib.sha256(), storage / "temporary"
        with temporary.open("wb") as file:
            for part in [struct.pack("<Q", len(header)) + header, *_noise(n, size)]:
                digest.update(part)
                file.write(part)
        name, blob = f"model-{n + 1:05d}.safetensors", storage / "blobs" / digest.hexdigest()
        temporary.rename(blob)
        (root / name).symlink_to(f"../../blobs/{blob.name}")
        files[name] = (blob.stat().st_size, digest.hexdigest())
    return root, files


def _noise(seed: int, size: int) -> list[bytes]:
    """The same 32 MiB again and again, each time with another start: no file system here compresses it."""
    block, parts = os.urandom(32 << 20), []
    while size > 0:
        parts.append(block[:size])
        size -= len(parts[-1])
    return parts


class Listing(BaseHTTPRequestHandler):
    """The two answers that `hf cache verify` needs."""

    files: ClassVar[dict[str, tuple[int, str]]] = {}

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        rows = [
            {
                "type": "file",
                "path": name,
                "size": size,
                "oid": "0" * 40,
                "lfs": {"oid": digest, "size": size, "pointerSize": 134},
            }
            for name, (size, digest) in self.files.items()
        ]
        body = json.dumps(rows if "/tree/" in self.path else {"id": REPO, "sha": COMMIT, "siblings": []}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)


def drop_caches() -> None:
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("1")


def cpu_seconds() -> float:
    """User and system time of this process and its ended children."""
    times = os.times()
    return sum(times[:4])


def openssl(paths: list[Path]) -> None:
    """As many processes as cores, each with the next file."""
    command = ["xargs", "-0", "-n", "1", "-P", str(len(os.sched_getaffinity(0))), "openssl", "dgst", "-sha256"]
    subprocess.run(command, input=b"\0".join(os.fsencode(p) for p in paths), check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path("/tmp/relaunch-bench"))
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--without-sglang", action="store_true", help="its start alone takes longer than the rest")
    options = parser.parse_args()
    total = int(options.gigabytes * 1e9)
    options.dir.mkdir(parents=True)
    if shutil.disk_usage(options.dir).free < 2 * total:
        sys.exit(f"{options.dir}: not enough room for {options.gigabytes} GB")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Listing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        storage = options.dir / "hub" / f"models--{REPO.replace('/', '--')}"
        root, files = make(storage, total)
        Listing.files = files
        entries = {n: Entry(n, size, "sha256", digest) for n, (size, digest) in files.items()}
        located = Located("hub", REPO, COMMIT, root, Manifest(entries, "bench", closed=True))
        sums = options.dir / "sums.json"
        sums.write_text(json.dumps({"files": {n: {"sha256": d, "size": s} for n, (s, d) in files.items()}}))
        hub = {
            **os.environ,
            "HF_HOME": str(options.dir),
            "HF_HUB_CACHE": str(options.dir / "hub"),
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        venv = Path(sys.executable).parent

        def ours() -> None:
            verdict = verify(located, Policy("full", None, 3600.0), threading.Event())
            assert verdict.ok and verdict.level == "full"

        def hf() -> None:
            command = [str(venv / "hf"), "cache", "verify", REPO, "--revision", COMMIT]
            subprocess.run(command, env=hub, check=True, capture_output=True)

        def sglang() -> None:
            module = "sglang.srt.utils.model_file_verifier"
            command = [
                sys.executable,
                "-P",
                "-m",
                module,
                "verify",
                "--model-path",
                str(root),
                "--model-checksum",
                str(sums),
            ]
            subprocess.run(command, check=True, capture_output=True)

        methods: dict[str, Callable[[], None]] = {
            "relaunch": ours,
            "openssl": lambda: openssl([p.resolve() for p in root.iterdir()]),
            "hf": hf,
        }
        if not options.without_sglang:
            methods["sglang"] = sglang
        times: dict[str, list[float]] = {name: [] for name in methods}
        cpu: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(options.rounds):
            for name, method in methods.items():
                if options.cold:
                    drop_caches()
                begin, used = time.perf_counter(), cpu_seconds()
                method()
                times[name].append(time.perf_counter() - begin)
                cpu[name].append(cpu_seconds() - used)
        medians = {name: statistics.median(values) for name, values in times.items()}
        print(
            json.dumps(
                {
                    "gigabytes": round(sum(s for s, _ in files.values()) / 1e9, 2),
                    "cores": len(os.sched_getaffinity(0)),
                    "cold": options.cold,
                    "load": os.getloadavg()[0],
                    "seconds": times,
                    # What a method costs whatever else the machine does: its own user and system time.
                    "cpu_seconds_per_gb": {n: round(statistics.median(v) / total * 1e9, 3) for n, v in cpu.items()},
                    "gb_per_second": {n: round(total / 1e9 / s, 2) for n, s in medians.items()},
                    "relaunch_is_times_as_fast_as": {
                        n: round(s / medians["relaunch"], 3) for n, s in medians.items() if n != "relaunch"
                    },
                },
                indent=1,
            )
        )
    finally:
        server.shutdown()
        shutil.rmtree(options.dir)


if __name__ == "__main__":
    main()
