"""What the commands print for people: one function for each document, readable at 80 columns.

Colours come from rich, which obeys NO_COLOR and writes plain text into files and pipes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..healing.labels import ACTION_LABELS
from ..units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..host.inventory import Inventory

Document = Mapping[str, Any]

VERDICT_STYLE = {"pass": "green", "warn": "yellow", "fail": "bold red", "unknown": "dim"}
STATE_STYLE = {"ok": "green", "unverified": "yellow", "missing": "red", "damaged": "bold red"}
SOURCE_STYLE = {"environment": "cyan", "preset": "green", "default": "dim"}
# Rows of a table before it says how many more there are.
FILES_SHOWN = 40
ALL_FILES_SHOWN = 20
EVIDENCE_SHOWN = 12
BOOTS_SHOWN = 15
POST_MORTEMS_SHOWN = 8


def weights(document: Document, console: Console | None = None) -> None:
    """`relaunch weights`: the verdict, then each file that is not good, or every file when there are few."""
    out = console or stdout_console()
    files = document["files"]
    out.print(
        _pairs(
            [
                ("model", str(document["model"]) + (f" @ {document['revision']}" if document["revision"] else "")),
                ("path", document["path"] or "not on this host"),
                ("present", f"{format_bytes(document['bytes_present'])} of {format_bytes(document['bytes'])}"),
                (
                    "checked",
                    {
                        "none": "not yet",
                        "quick": "headers and sizes",
                        "full": "every byte",
                        "recorded": "every byte, by an earlier recorded check",
                    }[document["level"]],
                ),
            ]
        )
    )
    bad = [row for row in files if row["state"] in ("missing", "damaged")]
    shown = bad or (files if len(files) <= ALL_FILES_SHOWN else [])
    if shown:
        table = columns("file", "size", "state")
        table.columns[1].justify = "right"
        for row in shown[:FILES_SHOWN]:
            state = row["state"] + (f": {row['reason']}" if row["reason"] else "")
            table.add_row(styled(row["path"]), format_bytes(row["size"]), styled(state, STATE_STYLE[row["state"]]))
        out.print(table)
        if len(shown) > FILES_SHOWN:
            out.print(f"and {len(shown) - FILES_SHOWN} more")
    if document["ok"]:
        out.print(styled(f"good: {len(files)} files", "green"))
    elif not bad:
        out.print(styled(f"not proven: {len(files)} files known", "yellow"))
    else:
        count = f"{len(bad)} of {len(files)} files are not good"
        out.print(styled(f"{count}; `relaunch weights repair` fetches them", "red"))


def doctor(document: Document, console: Console | None = None) -> None:
    """`relaunch doctor`: a line for each check, the command that mends it below, and the count of verdicts."""
    out = console or stdout_console()
    table = _grid(8, None)
    count = dict.fromkeys(VERDICT_STYLE, 0)
    for check in document["checks"]:
        verdict = check["verdict"]
        count[verdict] += 1
        line = styled(check["title"], "bold" if verdict in ("warn", "fail") else "")
        line.append(f"  {check['detail']}", "" if verdict in ("warn", "fail") else "dim")
        table.add_row(styled(verdict, VERDICT_STYLE[verdict]), line)
        if check["fix"] and verdict != "pass":
            table.add_row("", styled(f"fix: {check['fix']}", "cyan"))
    out.print(table)
    summary = ", ".join(f"{number} {verdict}" for verdict, number in count.items() if number)
    if document["ok"]:
        out.print(styled(f"no check failed: {summary}", "green"))
    else:
        out.print(styled(f"failed: {summary}", "red"))


def config(document: Document, console: Console | None = None) -> None:
    """`relaunch config`: what was set comes first, then the defaults."""
    out = console or stdout_console()
    if document["preset"]:
        out.print(styled(f"preset {document['preset']}", "bold"))
    rows = document["settings"]
    table = columns("setting", "value", "from")
    for row in sorted(rows, key=lambda row: row["source"] == "default"):
        value = "not set" if row["value"] in (None, "") else _value(row["name"], row["value"])
        table.add_row(
            styled(row["name"], "bold" if row["source"] != "default" else ""),
            styled(value, "dim" if value == "not set" else ""),
            styled(row["source"], SOURCE_STYLE.get(row["source"], "")),
        )
    out.print(table)
    out.print(styled("what each does: docs/settings.md", "dim"))


def explain(document: Document, console: Console | None = None) -> None:
    """`relaunch explain`: the cause, what would be done, and the evidence."""
    out = console or stdout_console()
    action = document["action"]
    rank = document["rank"]
    where = f"stage {document['stage']}" + ("" if rank is None else f", rank {rank}")
    rows = [
        ("cause", f"{document['cause']} ({where}; confidence {document['confidence']:.0%})"),
        ("meaning", document["summary"]),
        ("relaunch would", ACTION_LABELS.get(action, action)),
    ]
    if document["next_step"]:
        rows.append(("you could", document["next_step"]))
    out.print(_pairs(rows))
    if document["evidence"]:
        out.print(styled("evidence", "bold"))
        table = _grid(7, None)
        table.columns[0].justify = "right"
        for line in document["evidence"][:EVIDENCE_SHOWN]:
            table.add_row(styled(str(line["line"]), "dim"), styled(_shortened(line["text"], 400)))
        out.print(table)


def history(document: Document, console: Console | None = None) -> None:
    """`relaunch history`: the newest boots, then the newest ends that nobody asked for."""
    out = console or stdout_console()
    boots, post_mortems = document["boots"], document["post_mortems"]
    if not boots and not post_mortems:
        out.print("no boot yet on this state directory")
        return
    by_id = {row["id"]: row for row in post_mortems}
    table = columns("started (UTC)", "ready after", "served", "end")
    for boot in boots[-BOOTS_SHOWN:]:
        end = by_id.get(boot["post_mortem"])
        served = _between(boot["ready_at"], boot["ended_at"])
        if end is not None:
            last = styled(end["cause"], "red")
        elif boot["ended_at"] is None:
            last = styled("running, or cut off", "yellow")
        else:
            last = styled("as asked", "green")
        table.add_row(_clock(boot["started_at"]), _between(boot["started_at"], boot["ready_at"]), served, last)
    out.print(table)
    if len(boots) > BOOTS_SHOWN:
        out.print(styled(f"and {len(boots) - BOOTS_SHOWN} older boots (--json has them all)", "dim"))
    for row in post_mortems[-POST_MORTEMS_SHOWN:]:
        _post_mortem(out, row)
    if len(post_mortems) > POST_MORTEMS_SHOWN:
        out.print(styled(f"and {len(post_mortems) - POST_MORTEMS_SHOWN} older post-mortems", "dim"))


def _post_mortem(out: Console, row: Document) -> None:
    code = "" if row["exit_code"] is None else f", exit code {row['exit_code']}"
    out.print()
    out.print(styled(f"{_clock(row['at'])}  {row['cause']}", "bold").append(f" in stage {row['stage']}{code}", ""))
    details = [row["summary"]] if row.get("summary") else []
    details += [
        f"changed {change['setting']} from {change['from']} to {change['to']}: {change['reason']}"
        for change in row["changed"] or ()
    ]
    done = ACTION_LABELS.get(row["action"], row["action"])
    details.append("relaunch gave up" if row["gave_up"] else f"relaunch's answer: {done}")
    table = _grid(2, None)
    for detail in details:
        table.add_row("", styled(detail))
    table.add_row("", styled(f"file: post-mortems/{row['id']}.json", "dim"))
    out.print(table)


def hardware(box: Inventory, console: Console | None = None, links: Document | None = None) -> None:
    """`relaunch hardware`: the host in a few lines, a line for each GPU, and what its links were measured to do."""
    out = console or stdout_console()
    rows = [
        ("driver", f"{box.driver or 'none'}" + (f" (CUDA up to {box.cuda})" if box.cuda else "")),
        ("host", f"{box.cpu_count} CPUs, {format_bytes(box.host_memory_bytes)} of memory"),
    ]
    if len(box.gpus) > 1:
        rows.append(("links", "NVLink between all GPUs" if box.nvlink else "PCIe, no NVLink"))
    rows += [("note", note) for note in box.notes]
    out.print(_pairs(rows))
    if not box.gpus:
        out.print("no GPU: `rehearsal` presets serve on the CPU")
        return
    table = columns("GPU", "name", "SM", "memory", "free", "PCI", "NUMA")
    for column in (0, 2, 3, 4, 6):
        table.columns[column].justify = "right"
    for gpu in box.gpus:
        table.add_row(
            str(gpu.index),
            styled(gpu.name.removeprefix("NVIDIA ")),
            str(gpu.sm),
            format_bytes(gpu.total_bytes),
            format_bytes(gpu.free_bytes),
            (gpu.pci_bus_id or "-")[-12:],
            "-" if gpu.numa_node is None else str(gpu.numa_node),
        )
    out.print(table)
    if links:
        out.print(_links(links))


def _links(links: Document) -> Table:
    """What `hardware --measure` found."""
    table = columns("measured", "", "small copy")
    for row in links["host"]:
        to, back = (format_bytes(row[f"to_{way}_bytes_per_second"]) for way in ("gpu", "host"))
        small = f"{row['to_gpu_seconds'] * 1e6:.1f} µs"
        table.add_row(f"host and GPU {row['gpu']}", f"{to}/s to it, {back}/s back", small)
    for row in links["pairs"]:
        how = "" if row["peer_access"] else ", no peer access"
        rate = f"{format_bytes(row['bytes_per_second'])}/s{how}"
        table.add_row(f"GPU {row['from']} to {row['to']}", rate, f"{row['seconds'] * 1e6:.1f} µs")
    for row in links["all_reduce"]:
        table.add_row(f"all-reduce, {format_bytes(row['bytes'])}", f"{row['seconds'] * 1e6:,.1f} µs", "")
    return table


def stdout_console() -> Console:
    """A console on stdout that colours no numbers of its own accord."""
    from rich.console import Console

    return Console(highlight=False)


def styled(text: str, style: str = "") -> Any:
    """Text that is never read as markup: file names and log lines may hold brackets."""
    from rich.text import Text

    return Text(text, style=style)


def columns(*headers: str) -> Table:
    """A table without lines whose cells fold."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _grid(first: int, second: int | None) -> Table:
    """Two columns without headers; widths in characters."""
    from rich.table import Table

    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=first, no_wrap=True)
    table.add_column(width=second, overflow="fold")
    return table


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    table = _grid(14, None)
    for name, value in rows:
        table.add_row(styled(name, "bold"), styled(str(value)))
    return table


def _value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and not name.endswith("FRACTION_STATIC"):
        return f"{value / 86400:g}d" if value >= 172800 else format_duration(value)
    if isinstance(value, int) and name.endswith(("_MARGIN", "_RATE")):
        return format_bytes(value)
    if isinstance(value, Path):
        return str(value)
    return str(value)


def _clock(stamp: str | None) -> str:
    """``2025-11-29 18:33:12`` of an RFC 3339 stamp."""
    return "-" if stamp is None else stamp[:19].replace("T", " ")


def _between(start: str | None, end: str | None) -> str:
    if start is None or end is None:
        return "-"
    first, last = (datetime.fromisoformat(stamp.replace("Z", "+00:00")) for stamp in (start, end))
    return format_duration(max(0.0, (last - first).total_seconds()))


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
