"""What verified weights cost at boot: 83 shards of 400 GB (sparse, true headers), recorded, warm and cold.

    python -P benchmarks/weights_boot.py [--rounds 20] [--dir /tmp/relaunch-boot]

The verdict is written as a full verify writes it (the digests are not asked at a recorded boot). Cold (root only) drops
the page cache, inodes and directory entries before each boot. Everything is removed at the end (about 60 MB).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import struct
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from entrypoint.config import settings
from entrypoint.weights import hashing, prepare, records
from entrypoint.weights.manifest import Entry, Manifest
from entrypoint.weights.source import Located
from entrypoint.weights.verify import Policy, verify

REPO, COMMIT = "bench/model", "c" * 40
SHARDS, TENSORS, BYTES = 83, 2900, 4_800_000_000


def make(storage: Path) -> Path:
    """83 shards with 240,700 tensors in the hub cache's layout; the data are holes."""
    root = storage / "snapshots" / COMMIT
    root.mkdir(parents=True)
    (storage / "blobs").mkdir()
    each, index = BYTES // TENSORS // 64 * 64, {}
    for n in range(SHARDS):
        name = f"model-{n + 1:05d}-of-{SHARDS:05d}.safetensors"
        header: dict[str, Any] = {}
        for k in range(TENSORS):
            tensor = f"model.layers.{n}.mlp.experts.{k // 12}.{k % 12}.weight"
            header[tensor] = {"dtype": "U8", "shape": [each // 64, 64], "data_offsets": [k * each, (k + 1) * each]}
            index[tensor] = name
        text = json.dumps(header, separators=(",", ":")).encode()
        blob = storage / "blobs" / f"{n:064x}"
        with blob.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + TENSORS * each)
        (root / name).symlink_to(f"../../blobs/{blob.name}")
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (root / "config.json").write_text('{"architectures": ["GlmMoeDsaForCausalLM"]}')
    return root


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dir", type=Path, default=Path("/tmp/relaunch-boot"))
    options = parser.parse_args()
    options.dir.mkdir(parents=True)
    try:
        root = make(options.dir / "hub" / f"models--{REPO.replace('/', '--')}")
        state, entries, verified = options.dir / "state", {}, {}
        for path in sorted(root.iterdir()):
            status, digest = path.stat(), path.resolve().name.rjust(64, "0")[:64].replace(".", "0")
            digest = digest if len(digest) == 64 and path.is_symlink() else "0" * 64
            entries[path.name] = Entry(path.name, status.st_size, "sha256", digest)
            identity = hashing.identity(status)
            verified[path.name] = records.VerifiedFile(status.st_size, "sha256", digest, identity, time.time())
        manifest = Manifest(entries, "bench", closed=True)
        records.save_listing(state, REPO, COMMIT, manifest)
        records.save(state, records.VerificationRecord(REPO, COMMIT, str(root), "bench", True, verified))
        loaded = settings.load(
            {"RELAUNCH_MODEL": REPO, "RELAUNCH_REVISION": COMMIT, "RELAUNCH_STATE_DIR": str(state)}, {}
        )
        environ = {
            "HOME": str(options.dir),
            "HF_HUB_CACHE": str(options.dir / "hub"),
            "HF_ENDPOINT": "http://127.0.0.1:9",
        }

        async def boot() -> float:
            begin = time.perf_counter()
            snapshot = await prepare(loaded, environ=environ)
            spent = time.perf_counter() - begin
            assert snapshot.level == "recorded" and snapshot.files == SHARDS + 2
            return spent

        async def boots(rounds: int, *, cold: bool) -> list[float]:
            spent = []
            for _ in range(rounds):
                if cold:
                    subprocess.run(["sync"], check=True)
                    Path("/proc/sys/vm/drop_caches").write_text("3")
                spent.append(await boot())
            return spent

        results: dict[str, Any] = {
            "terabytes": round(sum(e.size or 0 for e in entries.values()) / 1e12, 3),
            "load": os.getloadavg()[0],
        }
        warm = asyncio.run(boots(options.rounds, cold=False))
        results["recorded_warm_ms"] = [round(statistics.median(warm) * 1e3, 2), round(max(warm) * 1e3, 2)]
        if os.geteuid() == 0:
            cold = asyncio.run(boots(max(3, options.rounds // 4), cold=True))
            results["recorded_cold_ms"] = [round(statistics.median(cold) * 1e3, 2), round(max(cold) * 1e3, 2)]
        located = Located("hub", REPO, COMMIT, root, manifest)
        quick = []
        for _ in range(3):
            begin = time.perf_counter()
            assert verify(located, Policy("quick", None, 1.0), threading.Event()).ok
            quick.append(time.perf_counter() - begin)
        results["quick_warm_ms"] = [round(statistics.median(quick) * 1e3), round(max(quick) * 1e3)]
        print(json.dumps(results, indent=1))
    finally:
        shutil.rmtree(options.dir)


if __name__ == "__main__":
    main()
