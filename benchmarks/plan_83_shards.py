"""Plan a checkpoint of 83 shards and about 240,000 tensors: seconds and peak memory of a fresh process.

usage: python benchmarks/plan_83_shards.py [DIRECTORY]

Without a directory a GLM-5 checkpoint with true headers and no data (sparse files) is written and removed again.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path

from entrypoint.checkpoint import geometry as checkpoint_geometry
from entrypoint.checkpoint import tensors as checkpoint_tensors

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "tests" / "plan" / "configs" / "glm-5-nvfp4.json"
SHARDS = 83


def write(directory: Path, config: dict[str, object]) -> None:
    """Shards with the headers of ``config``'s tensors; the data is a hole."""
    (directory / "config.json").write_text(json.dumps(config))
    geometry = checkpoint_geometry.of(config, str(config["architectures"][0]))  # type: ignore[index]
    tensors = list(_each(checkpoint_tensors.generate(geometry, checkpoint_tensors.config_quantization(config))))
    weight_map = {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor, dtype, shape in tensors[shard * len(tensors) // SHARDS : (shard + 1) * len(tensors) // SHARDS]:
            size = prod(shape) * checkpoint_tensors.ITEMSIZE[dtype]
            header[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
            weight_map[tensor] = name
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (directory / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + offset)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _each(groups: list[checkpoint_tensors.Tensor]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for group in groups:
        for number in range(group.copies):
            yield group.name.replace(".*.", f".{number}."), group.dtype, group.shape


def measure(directory: Path) -> dict[str, float]:
    """Read and plan in this process. Imports are counted apart, as every verb has them."""
    began = time.perf_counter()
    from entrypoint import plan
    from entrypoint.checkpoint import model as checkpoint
    from entrypoint.config import settings
    from entrypoint.host import inventory

    imported = time.perf_counter()
    gpus = tuple(inventory.Gpu(i, "RTX PRO 6000", 120, 97887 << 20, 97271 << 20) for i in range(8))
    loaded = settings.load({"RELAUNCH_MODEL": str(directory)}, {})
    found = checkpoint.read(directory, model=str(directory))
    read = time.perf_counter()
    made = plan.make(loaded, inventory.Inventory(gpus=gpus, host_memory_bytes=1 << 40), found)
    done = time.perf_counter()
    return {
        "tensors": found.tensors,
        "import_s": imported - began,
        "read_s": read - imported,
        "plan_s": done - read,
        "total_s": done - began,
        "cpu_s": time.process_time(),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
        "max_total_tokens": made.max_total_tokens or 0,
    }


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--measure"]:
        print(json.dumps(measure(Path(arguments[1]))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(arguments[0]) if arguments else Path(temporary)
        if not arguments:
            write(directory, json.loads(CONFIG.read_text()))
        for _ in range(3):
            command = [sys.executable, "-P", __file__, "--measure", str(directory)]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(
                "  ".join(
                    f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}"
                    for name, value in row.items()
                )
            )


if __name__ == "__main__":
    main(sys.argv[1:])
