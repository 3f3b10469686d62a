"""Small true checkpoints, settings for them, and one place where a test's cache and state lie."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from entrypoint.config import settings
from entrypoint.errors import Stop
from entrypoint.weights import Snapshot, TransferProgress, prepare

REPO = "org/tiny"


def shard(tensors: Mapping[str, tuple[int, ...]], seed: int) -> bytes:
    """A safetensors file of BF16 noise."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body, source = bytearray(), random.Random(seed)
    for name, shape in tensors.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [len(body), len(body) + size]}
        body += source.randbytes(size)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(body)


def checkpoint(root: Path, shards: int = 3, rows: int = 512, seed: int = 0) -> Path:
    """config, tokenizer, index and ``shards`` shards of about ``rows`` KiB each."""
    root.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for n in range(shards):
        name = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        tensors = {f"layers.{n}.up": (rows, 256), f"layers.{n}.down": (256, rows)}
        index |= dict.fromkeys(tensors, name)
        (root / name).write_bytes(shard(tensors, seed + n))
    documents = {
        "config.json": {"architectures": ["TinyForCausalLM"], "model_type": "tiny", "seed": seed},
        "tokenizer.json": {"version": "1.0", "model": {"type": "BPE", "vocab": {str(n): n for n in range(99)}}},
        "model.safetensors.index.json": {"metadata": {}, "weight_map": index},
    }
    for name, document in documents.items():
        (root / name).write_text(json.dumps(document))
    return root


@dataclass
class Bench:
    """A cache, a state directory and an endpoint; ``progress`` collects what was reported."""

    root: Path
    endpoint: str = "http://127.0.0.1:9"
    model: str = REPO
    extra: dict[str, str] = field(default_factory=dict)
    progress: list[TransferProgress] = field(default_factory=list)

    @property
    def cache(self) -> Path:
        return self.root / "home" / "hub"

    @property
    def storage(self) -> Path:
        return self.cache / f"models--{self.model.replace('/', '--')}"

    @property
    def environ(self) -> dict[str, str]:
        hub = {name: value for name, value in self.extra.items() if not name.startswith("RELAUNCH_")}
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.root),
            "HF_HOME": str(self.root / "home"),
            "HF_ENDPOINT": self.endpoint,
            **hub,
        }

    def loaded(self, **values: str) -> settings.Loaded:
        """Settings from keyword names without RELAUNCH_, in lower case."""
        given = {
            "RELAUNCH_MODEL": self.model,
            "RELAUNCH_STATE_DIR": str(self.root / "state"),
            "RELAUNCH_CACHE_DIR": str(self.root / "relaunch-cache"),
            **{name: value for name, value in self.extra.items() if name.startswith("RELAUNCH_")},
            **{f"RELAUNCH_{name.upper()}": value for name, value in values.items()},
        }
        return settings.load(given, {})

    async def prepare(self, **values: str) -> Snapshot:
        return await prepare(self.loaded(**values), on_progress=self.progress.append, environ=self.environ)


def flip(path: Path, at: int = -100) -> None:
    """Change one byte of the real file, as a bad disk would."""
    real = path.resolve()
    data = bytearray(real.read_bytes())
    data[at] ^= 0x01
    real.chmod(0o644)
    with real.open("r+b") as file:
        file.write(data)


def incomplete(bench: Bench) -> list[Path]:
    return sorted(bench.cache.rglob("*.incomplete"))


def same_files(root: Path, other: Path) -> bool:
    """Every file of ``other`` is in ``root`` with the same bytes."""
    names = [p.relative_to(other) for p in other.rglob("*") if p.is_file()]
    return all((root / name).is_file() and (root / name).read_bytes() == (other / name).read_bytes() for name in names)


async def refused(bench: Bench, **values: str) -> Stop:
    """The one line that ends it; no token is ever in it."""
    with pytest.raises(Stop) as caught:
        await bench.prepare(**values)
    line = caught.value.line()
    assert "\n" not in line and "hf_" not in line.replace("hf_xet", "")
    return caught.value
