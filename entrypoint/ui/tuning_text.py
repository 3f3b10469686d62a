"""What `bench`, `check`, `compare` and `tune` print for people, readable at 80 columns."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..tuning.bench import OnProgress, figure
from ..tuning.check import Item
from ..tuning.tune import OnArm
from ..units import format_duration
from .tables import columns, stdout_console, styled

BAR = 36
VERDICT_STYLE = {"pass": "green", "fail": "bold red", "not applicable": "dim"}


@contextmanager
def bench_progress(concurrency: Sequence[int]) -> Iterator[OnProgress]:
    """A progress bar on stderr, one task for each concurrency in turn."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    shown_as = (TextColumn("{task.description}"), BarColumn(BAR), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*shown_as, console=Console(stderr=True)) as shown:
        tasks = {level: shown.add_task(f"{level:>4} clients", total=None, start=False) for level in concurrency}

        def on_progress(level: int, done: int, of: int) -> None:
            shown.start_task(tasks[level])
            shown.update(tasks[level], completed=done, total=of or None)

        yield on_progress


def bench(found: Mapping[str, Any], out: Any = None) -> None:
    """The levels as a table, and the rate over the concurrency as bars."""
    out = out or stdout_console()
    levels = found["levels"]
    rate = figure(levels)
    load = found["load"]
    out.print(f"load {load['name']}: {load['prompt_tokens'] + load['shared_tokens']} tokens in, ", end="")
    out.print(f"{load['output_tokens']} out (half to all of them)" if load["prompt_tokens"] else "from a file")
    rows = columns(
        "clients", "answer t/s", "prompt t/s", "first token p50/p95/p99", "per token p50/p95/p99", "errors", "cached"
    )
    for level in levels:
        rows.add_row(
            str(level["concurrency"]),
            f"{level['output_tokens_per_second']:,.1f}",
            f"{level['prompt_tokens_per_second']:,.1f}",
            _spread(level["first_token_seconds"]),
            _spread(level["token_seconds"]),
            styled(str(level["errors"]), "red" if level["errors"] else ""),
            "-" if level["cached_share"] is None else f"{level['cached_share']:.0%}",
        )
    out.print(rows)
    most = max(level[rate] for level in levels) or 1.0
    out.print(styled(rate.replace("_", " "), "bold"))
    for level in levels:
        bar = "█" * max(1, round(BAR * level[rate] / most))
        out.print(styled(f"{level['concurrency']:>5} {bar} {level[rate]:,.1f}"))
    for level in levels:
        if level["accepted_drafts"] is not None:
            out.print(f"{level['concurrency']} clients: {level['accepted_drafts']} drafts accepted each step")
        if level["watts"] is not None:
            out.print(f"{level['concurrency']} clients: {level['watts']} W, {level['tokens_per_joule']} tokens/J")
        if level["first_error"]:
            out.print(styled(f"{level['concurrency']} clients, first error: {level['first_error']}", "red"))


def check_item(item: Item) -> None:
    """One line of `relaunch check`; below it, for what failed, the command that repeats it."""
    line = styled(f"{item.verdict:<15}", VERDICT_STYLE[item.verdict])
    stdout_console().print(line.append(f"{item.title}: {item.detail}", ""))
    if item.verdict == "fail":
        stdout_console().print(styled(f"  repeat: {item.repeat}", "cyan"), soft_wrap=True)


@contextmanager
def arms_table() -> Iterator[OnArm]:
    """A table of the arms on stderr: drawn anew at every step on a terminal, a line for each step elsewhere."""
    from rich.console import Console
    from rich.live import Live

    out = Console(stderr=True, highlight=False)
    rows: dict[str, str] = {}

    def drawn() -> Any:
        shown = columns("arm", "score")
        for name, state in rows.items():
            shown.add_row(styled(name), styled(state))
        return shown

    def on_arm(name: str, score: float | None, why: str | None) -> None:
        rows[name] = f"dropped: {why}" if why else "..." if score is None else f"{score:,.1f} tokens/s"
        if out.is_terminal:
            live.update(drawn(), refresh=True)
        elif rows[name] != "...":
            print(f"relaunch: {name}: {rows[name]}", file=sys.stderr, flush=True)

    if not out.is_terminal:
        yield on_arm
        return
    with Live(drawn(), console=out, auto_refresh=False) as live:
        yield on_arm


def tune(found: Mapping[str, Any], out: Any = None) -> None:
    """What came of the search."""
    out = out or stdout_console()
    if found["winner"] is None:
        out.print(styled(f"nothing is kept: {found['why']}", "yellow"))
        return
    gain = f"{found['gain']:+.1%} over the untuned plan, spread {found['spread']:.1%}" if "gain" in found else ""
    if found["kept"]:
        out.print(styled(f"kept: {found['winner']}: {gain}", "green"))
        out.print("the next `relaunch serve` starts with it; `relaunch reset --tuned` forgets it")
    else:
        out.print(styled(f"nothing is kept: {found['winner']}: {gain}: {found['why']}", "yellow"))


def compare(found: Mapping[str, Any], out: Any = None) -> None:
    """The numbers, then what differs, what explains most first."""
    out = out or stdout_console()
    if found["numbers"]:
        rows = columns("clients", "", "A", "B", "B/A")
        for row in found["numbers"]:
            style = {"a": "red", "b": "green"}.get(row["better"] or "", "dim")
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
            rows.add_row(str(row["concurrency"]), row["what"], f"{row['a']:g}", f"{row['b']:g}", styled(ratio, style))
        out.print(rows)
    for row in found["answers"]:
        out.print(styled(f"{row['what']}: {row['a']} in A, {row['b']} in B", "yellow"))
    if not found["differences"]:
        out.print("box, versions, plan and load are the same")
        return
    rows = columns("what differs", "A", "B", "")
    for row in found["differences"]:
        rows.add_row(*(styled("-" if v is None else str(v)) for v in (row["what"], row["a"], row["b"], row["meaning"])))
    out.print(rows)


def _spread(percentiles: Mapping[str, float]) -> str:
    return " / ".join(_short(percentiles[name]) for name in ("p50", "p95", "p99"))


def _short(seconds: float) -> str:
    return (
        f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s" if seconds < 60 else format_duration(seconds)
    )
