"""Published checkpoints and boxes as files of facts: config.json, the tensors of the headers in a short form, cards."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from entrypoint import plan
from entrypoint.checkpoint import geometry
from entrypoint.checkpoint import model as checkpoint
from entrypoint.checkpoint.safetensors import DTYPE_BITS, TensorGroups
from entrypoint.host.inventory import Gpu, Inventory
from entrypoint.plan import extra_weights, solve
from entrypoint.plan.sharding import Parallel

CASES = Path(__file__).with_name("cases")


def names() -> list[str]:
    """Every checkpoint of ``cases/checkpoints``."""
    return sorted(path.stem for path in (CASES / "checkpoints").glob("*.json"))


@cache
def document(name: str) -> dict[str, Any]:
    """One file: ``config`` (config.json), ``quantization`` (hf_quant_config.json, where it stands apart) and
    ``tensors``, absent where only the config is known: name with ``{}`` for the layer, dtype, shape, how many experts,
    and the layers' ranges."""
    found: dict[str, Any] = json.loads((CASES / "checkpoints" / f"{name}.json").read_text())
    return found


@cache
def read(name: str) -> checkpoint.Checkpoint:
    """The checkpoint as its directory would be read."""
    found = document(name)
    return checkpoint.assemble(
        found["config"], found.get("quantization", {}), _tensors(found), model=name, revision=None, path=None
    )


def _tensors(found: dict[str, Any]) -> TensorGroups | None:
    if "tensors" not in found:
        return None
    groups = TensorGroups()
    for name, dtype, shape, count, ranges in found["tensors"]:
        size = prod(shape) * DTYPE_BITS[dtype] // 8
        layers = [layer for first, last in ranges for layer in range(first, last + 1)]
        for whole in [name.replace("{}", str(layer), 1) for layer in layers] or [name]:
            groups.counts[whole, dtype, tuple(shape)] = [count, size]
    return groups


def write_config(name: str, directory: Path) -> None:
    """The files that the engine reads to build its class: no weights."""
    found = document(name)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(found["config"]))
    if "quantization" in found:
        (directory / "hf_quant_config.json").write_text(json.dumps(found["quantization"]))


@cache
def boxes() -> dict[str, Inventory]:
    """Every box of ``cases/boxes.json``: how many of a card, its name, SM, total and free bytes."""
    return {name: _box(found) for name, found in json.loads((CASES / "boxes.json").read_text()).items()}


def _box(found: dict[str, Any]) -> Inventory:
    cards = [card for count, *card in found["gpus"] for _ in range(count)]
    return Inventory(
        gpus=tuple(Gpu(index, *card) for index, card in zip(found.get("index", range(len(cards))), cards, strict=True)),
        host_memory_bytes=found["host_memory_bytes"],
        nvlink=found["nvlink"],
        recorded=True,
    )


def built(name: str, planned: plan.Plan, sm: int) -> int:
    """Bytes of rank 0's tensors by the planner's account, without what comes after they are built: copies of MLA's
    kv_b_proj, other layouts of scales, the allocator's rounding, a draft."""
    found = read(name)
    g = geometry.of(found.config, found.architecture)
    if "float32" in planned.flags:
        g = replace(g, itemsize=4)
    ranks = planned.parallel
    layout = Parallel(ranks["tp"], ranks["pp"], ranks["ep"], ranks["dp_attention"])
    held, _ = solve.shares(found, g, layout, sm, draft=False)[0]
    return held.tensors + extra_weights.rope_table(g, found, planned.context_length or 0)


def cases() -> list[dict[str, Any]]:
    """What was asked: ``id``, ``checkpoint``, ``box``, ``env`` (settings without their prefix) and, where the engine
    was asked, ``engine``: its ``plan`` (the planner's flags at that time) and ``default`` (none)."""
    found: list[dict[str, Any]] = json.loads((CASES / "cases.json").read_text())
    return found
