"""The part of the plan for people that speaks of several boxes: who holds what, what crosses, what it gives."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ..plan.nodes import size

Row = Mapping[str, Any]
# (node, GPU index)
Where = tuple[int, int]

# The link that times are given for, in bytes a second: 100 Gbit/s.
LINK, LINK_NAME = 100e9 / 8, "100 Gbit/s"


def kinds(accounts: Sequence[Row], keys: Sequence[str]) -> list[tuple[Row, list[Where]]]:
    """Accounts with the same numbers, and where they are."""
    found: dict[tuple[Any, ...], tuple[Row, list[Where]]] = {}
    for account in accounts:
        _, own = found.setdefault(tuple(account.get(key) for key in keys), (account, []))
        own.append((account.get("node", 0), account["index"]))
    return list(found.values())


def span(numbers: Sequence[int]) -> str:
    """``0-3,6`` for 0, 1, 2, 3 and 6."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def whose(own: Sequence[Where], accounts: Sequence[Row]) -> str:
    """The head of a column: GPUs, boxes, or GPUs of a box."""
    boxes = sorted({node for node, _ in own})
    if len({row.get("node", 0) for row in accounts}) == 1:
        return f"GPU {span([index for _, index in own])}"
    if len(own) == sum(row.get("node", 0) in boxes for row in accounts):
        return f"box {span(boxes)}"
    indices = {box: span([index for node, index in own if node == box]) for box in boxes}
    alike = {text: [box for box in boxes if indices[box] == text] for text in indices.values()}
    return "\n".join(f"box {span(some)} GPU {text}" for text, some in alike.items())


def heading(box: Row, size: int) -> str:
    """What one box holds; ``size`` is that of a whole tensor-parallel group."""
    return f"box {box['rank']}  {stages(box, size)}"


def stages(box: Row, size: int) -> str:
    """The pipeline stages of one host in one line."""
    return "; ".join(_stage(stage, size) for stage in box["stages"])


def _stage(stage: Row, size: int) -> str:
    first, last = stage["layers"]
    held = [f"layers {first}-{last}" if last > first else f"layer {first}"]
    held += [name for name in ("embedding", "lm_head") if stage[name]]
    ranks = span(range(stage["tensor_ranks"][0], stage["tensor_ranks"][1] + 1))
    part = f", tensor ranks {ranks}" if len(stage["gpus"]) < size else ""
    return f"stage {stage['stage']}{part}: {', '.join(held)}"


def network(document: Mapping[str, Any], width: int) -> list[Any]:
    """What crosses the network between the boxes, wrapped."""
    from rich.text import Text

    crossing = document["network"]
    texts = []
    for name, what in (("pipeline", "hidden states at the end of a stage"), ("tensor", "")):
        one = crossing[name]
        if one is None:
            continue
        if name == "tensor":
            what = f"{one['all_reduces']} all-reduces a step, one after the other"
        prefill, decode = one["bytes_per_prefill_step"], one["bytes_per_decode_step"]
        texts.append(
            f"{what}: {size(prefill)} for {crossing['prefill_tokens']:,} tokens of prefill "
            f"({_time(prefill)} at {LINK_NAME}), {size(decode)} for a decode step of "
            f"{crossing['decode_tokens']} ({_time(decode)})"
        )
    lines = [Text("between the boxes", style="italic")]
    for text in texts:
        lines += [Text(line) for line in textwrap.wrap(text, max(40, width - 2), break_on_hyphens=False)]
    return lines


def _time(size: float) -> str:
    seconds = size / LINK
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{max(0.1, 1000 * seconds):.1f} ms"


def against_one(document: Mapping[str, Any]) -> list[Any]:
    """What the group gives over one of its boxes."""
    from rich.table import Table
    from rich.text import Text

    alone = document.get("one_box")
    count = len(document.get("nodes") or ())
    if alone is None:
        return []
    if not alone["feasible"]:
        return [Text(f"one box alone: does not fit, {alone['reason']}", style="italic", overflow="fold")]
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in (f"{count} boxes", "one box", ""):
        table.add_column(name, justify="right")
    times = f"{alone['times']:.2f}x" if alone["times"] else ""
    table.add_row("KV tokens", _number(document["max_total_tokens"]), _number(alone["max_total_tokens"]), times)
    whole = [one["max_total_tokens"] // one["context_length"] for one in (document, alone)]
    table.add_row("prompts of full length at once", *map(_number, whole), "")
    for name in ("context_length", "max_running_requests", "kv_bytes_per_token"):
        table.add_row(name, _number(document[name]), _number(alone[name]), "")
    return [table]


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "-"
