"""The plan for people: a bar per GPU, the numbers behind it, every decision with its reason, the command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..plan.spec import SHOWN
from ..units import format_bytes
from . import plan_nodes_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

# In the order of the bar. Every part has a letter of its own, so that the bar reads without colours.
PARTS = (
    ("baseline_bytes", "driver, context, communicators", "▏", "bright_black"),
    ("weights_bytes", "weights", "█", "blue"),
    ("kv_bytes", "KV cache", "▓", "green"),
    ("graph_bytes", "CUDA graphs", "g", "magenta"),
    ("activation_bytes", "activations", "a", "yellow"),
    ("runtime_bytes", "workspaces, tables", "r", "cyan"),
    ("margin_bytes", "margin", "m", "red"),
    ("free_bytes", "free", "·", "bright_black"),
)
VALUES = (*SHOWN[:2], "kv_bytes_per_token", *SHOWN[2:])
KEYS = (*(name for name, *_ in PARTS), "load_peak_bytes")
BAR = 56
# Columns of numbers that fit beside their names.
COLUMNS = 4


# What a terminal without Unicode shows instead.
ASCII = str.maketrans({"▏": "|", "█": "#", "▓": "=", "·": ".", "…": "~"})
# The columns of "why": a longer setting or value gets a line of its own.
SETTING, VALUE = 24, 18


class _Plan:
    """Lines without trailing blanks, in the characters that the console can show."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        parts = _parts(self._document, options.max_width)
        for line in console.render_lines(parts, options, pad=False):
            while line and not line[-1].text.rstrip():
                line.pop()
            if line:
                line[-1] = line[-1]._replace(text=line[-1].text.rstrip())
            for segment in line:
                yield segment._replace(text=_encodable(segment.text, options))
            yield Segment.line()


def render(document: Mapping[str, Any]) -> RenderableType:
    """A rich renderable of a plan document; fits 80 columns and says the same without colours, and in ASCII
    where the console cannot encode more."""
    return _Plan(document)


def _encodable(text: str, options: ConsoleOptions) -> str:
    if not options.ascii_only:
        return text
    return text.translate(ASCII).encode("ascii", "replace").decode()


def _parts(document: Mapping[str, Any], width: int) -> Any:
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [_headline(document)]
    for reason in document.get("reasons") or ():
        parts.append(Text(f"  - {reason}", style="red"))
    if document.get("per_gpu"):
        parts += ["", *_bars(document), *_numbers(document["per_gpu"])]
    parts += ["", _values(document)]
    if document.get("network"):
        parts += ["", *plan_nodes_text.network(document, width), "", *plan_nodes_text.against_one(document)]
    parts += ["", *_decisions(document, width)]
    for warning in document.get("warnings") or ():
        parts.append(Text(f"warning: {warning}", style="yellow"))
    argv = (document.get("engine") or {}).get("argv") or []
    if argv:
        parts += ["", Text("engine command", style="bold"), Text(_command(argv))]
    return Group(*parts)


def _headline(document: Mapping[str, Any]) -> Any:
    from rich.text import Text

    model, parallel = document.get("model") or {}, document.get("parallel") or {}
    gpus = document.get("gpus") or []
    box = f"{len(gpus)}x {gpus[0]['name']}" if gpus else "the CPU"
    if gpus and len(document.get("nodes") or ()) > 1:
        box = f"{len(document['nodes'])} boxes of {box}"
    size = f", {format_bytes(model['bytes'])} in {model['tensors']} tensors" if model.get("bytes") else ""
    layout = " ".join(
        f"{name}={parallel[name]}" for name in ("tp", "pp", "ep", "dp_attention") if parallel.get(name, 1) != 1
    )
    text = Text(f"{model.get('id')}", style="bold")
    text.append(f" ({model.get('architecture') or 'unknown architecture'}{size}) on {box} {layout}\n", style="not bold")
    fits = bool(document.get("feasible"))
    text.append("fits" if fits else "does not fit", style="bold green" if fits else "bold red")
    return text


def _bars(document: Mapping[str, Any]) -> list[Any]:
    """A bar a GPU; on several boxes one for all that are alike in a box, under what the box holds."""
    from rich.text import Text

    totals = {gpu["index"]: gpu["total_bytes"] for gpu in document["gpus"]}
    lines: list[Any] = []
    boxes = document.get("nodes") or ()
    size = document["parallel"]["tp"]
    if len(boxes) < 2:
        lines += [Text(plan_nodes_text.stages(box, size), style="italic") for box in boxes if len(box["stages"]) > 1]
        lines += [_bar(f"GPU {row['index']:<2} ", row, totals) for row in document["per_gpu"]]
    for box in boxes if len(boxes) > 1 else ():
        lines.append(Text(plan_nodes_text.heading(box, size), style="italic"))
        alike = plan_nodes_text.kinds([row for row in document["per_gpu"] if row["node"] == box["rank"]], KEYS)
        lines += [_bar(f"GPU {plan_nodes_text.span([i for _, i in own]):<3} ", row, totals) for row, own in alike]
    legend = [Text(" " * 6)]
    for name, label, letter, colour in PARTS:
        if any(account.get(name) for account in document["per_gpu"]):
            if len(legend[-1]) + len(label) + 3 > BAR + 20:
                legend.append(Text(" " * 6))
            legend[-1].append(f" {letter}", style=colour)
            legend[-1].append(f" {label}")
    return [*lines, *legend]


def _bar(label: str, account: Mapping[str, Any], totals: Mapping[int, int]) -> Any:
    from rich.text import Text

    total = totals.get(account["index"]) or 1
    line = Text(label, no_wrap=True)
    used, drawn = 0, 0
    for name, _, letter, colour in PARTS:
        used += account.get(name) or 0
        until = min(BAR, round(used / total * BAR))
        # A part too small for a letter shows none rather than another's room.
        line.append(letter * max(0, until - drawn), style=colour)
        drawn = max(drawn, until)
    line.append(" " * (BAR - drawn) + f" {format_bytes(total)}")
    return line


def _numbers(accounts: list[Mapping[str, Any]]) -> list[Any]:
    """One column for GPUs with the same numbers."""
    from rich.table import Table
    from rich.text import Text

    kinds = plan_nodes_text.kinds(accounts, KEYS)
    shown = kinds[:COLUMNS]
    table = Table(box=None, pad_edge=False, show_header=len(kinds) > 1)
    table.add_column("")
    for _, own in shown:
        table.add_column(plan_nodes_text.whose(own, accounts), justify="right")
    labels = [label for _, label, *_ in PARTS] + ["peak while loading"]
    for label, key in zip(labels, KEYS, strict=True):
        table.add_row(label, *(format_bytes(row[key]) if row.get(key) is not None else "-" for row, _ in shown))
    left = len(kinds) - len(shown)
    return [table, *([Text(f"and {left} more that differ: relaunch plan --json", style="italic")] if left > 0 else [])]


def _values(document: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name in VALUES:
        value = document.get(name)
        if value is not None:
            table.add_row(name, f"{value:,}" if isinstance(value, int) and abs(value) > 9999 else str(value))
    return table


def _decisions(document: Mapping[str, Any], width: int) -> list[Any]:
    """Setting, value, reason in columns; a setting or value that is too long for its own stands above the reason."""
    import textwrap

    from rich.text import Text

    lines = [Text("why", style="italic"), Text(_columns("setting", "value") + "reason", style="bold")]
    indent = " " * (SETTING + VALUE + 2)
    for decision in document.get("decisions") or ():
        source, name, value = decision["source"], str(decision["setting"]), str(decision["value"])
        reason = ("" if source in ("computed", "default") else f"[{source}] ") + str(decision["reason"])
        first = _columns(name, value)
        if len(name) > SETTING or len(value) > VALUE:
            lines.append(Text(first.rstrip(), overflow="fold"))
            first = indent
        room = max(20, width - len(indent))
        wrapped = textwrap.wrap(reason, room, break_on_hyphens=False) or [""]
        lines += [Text((first if not i else indent) + line, overflow="fold") for i, line in enumerate(wrapped)]
    return lines


def _columns(name: str, value: str) -> str:
    return f"{name:<{SETTING}} {value:<{VALUE}} "


def _command(argv: list[str]) -> str:
    """One flag a line, ready to paste into a shell."""
    lines: list[str] = []
    for word in argv:
        quoted = shlex.quote(word)
        if word.startswith("--") or not lines:
            lines.append(quoted)
        else:
            lines[-1] += f" {quoted}"
    return " \\\n  ".join(lines)
