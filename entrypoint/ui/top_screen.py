"""The screen of `relaunch top` as lines, from the document of the control port's `/status`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..units import format_bytes, format_duration

Document = Mapping[str, Any]

_BARS = "▁▂▃▄▅▆▇█"
# Columns of the names, the values, and the lines over five minutes.
_NAME, _VALUE, _LINE = 13, 24, 30
_STYLES = {"good": "\x1b[32m", "busy": "\x1b[33m", "bad": "\x1b[31m", "bold": "\x1b[1m", "soft": "\x1b[2m"}


def screen(document: Document | None, columns: int, rows: int, *, color: bool) -> list[str]:
    """Return at most ``rows`` lines of at most ``columns`` characters. None: nobody answers any more."""
    if document is None:
        return [_styled("no news from the supervisor; trying again (q to leave)"[:columns], "bad", color)]
    lines = [
        *_head(document),
        *_serving(document),
        *_gpus(document["gpus"]),
        *_ends(document["ends"]),
    ]
    return [_styled(text[:columns], style, color) for text, style in lines[:rows]]


def spark(values: Sequence[float | None], width: int) -> str:
    """Return the last values as bars of eighths, a blank where none is known; as high as the largest."""
    shown = list(values)[-width:]
    most = max((value for value in shown if value is not None), default=0.0)
    steps = len(_BARS) - 1
    return "".join(" " if v is None else _BARS[round(steps * v / most) if most else 0] for v in shown)


def _head(d: Document) -> Iterator[tuple[str, str]]:
    style = "good" if d["ready"] else "bad" if d["phase"] == "GAVE_UP" else "busy"
    stage = f": {d['stage_words']}" if d["stage_words"] and not d["ready"] else ""
    yield f"relaunch  {d['phase_words']}{stage}, {format_duration(d['phase_seconds'])}   {d['model'] or ''}", style
    if d["reason"]:
        yield d["reason"], "bad"
    if d["next_step"]:
        yield f"next: {d['next_step']}", ""
    if not d["ready"] and d["percent"] is not None:
        left = d["estimate_seconds"]
        about = f"  about {format_duration(left)} left" if left else ""
        yield f"{_meter(d['percent'] / 100, _LINE)} {d['percent']:.0f}%{about}", "busy"
    yield "", ""


def _serving(d: Document) -> Iterator[tuple[str, str]]:
    serving = d["serving"]
    if not serving or not serving["now"]:
        return
    now, history, quantiles = serving["now"], serving["history"], serving["quantiles"]

    def row(name: str, value: str, series: str | None = None) -> tuple[str, str]:
        return f"{name:{_NAME}}{value:{_VALUE}} {spark(history[series], _LINE) if series else ''}".rstrip(), ""

    if not d["embedding"]:
        yield row("output", f"{_count(now['output'])} tokens/s", "output")
    yield row("prompts", f"{_count(now['prompt'])} tokens/s", "prompt")
    names = [("answer", "latency")] if d["embedding"] else [("first token", "first_token"), ("per token", "per_token")]
    for name, series in names:
        found = quantiles.get(series)
        text = f"p50 {_time(found['p50'])}  p95 {_time(found['p95'])}" if found else "none in a minute"
        yield row(name, text, series)
    room = d["plan"]["max_running_requests"]
    yield row("requests", f"{_count(now['running'])} running, {_count(now['queued'])} queued", "running")
    if not d["embedding"] and now["kv_used"] is not None:
        pool = f"{_meter(now['kv_used'], 14)} {now['kv_used']:4.0%}"
        yield f"{'KV pool':{_NAME}}{pool:{_VALUE}} of {_count(now['kv_tokens'])} tokens; room for {room} requests", ""
        hits = "-" if now["cache_hits"] is None else f"{now['cache_hits']:.0%} of prompt tokens"
        yield row("prefix cache", hits, "cache_hits")
    if now["accepted"]:
        yield row("speculation", f"{now['accepted']:.2f} tokens a step", "accepted")
    yield "", ""


def _gpus(gpus: Sequence[Document]) -> Iterator[tuple[str, str]]:
    live = [gpu for gpu in gpus if gpu["used_bytes"] is not None]
    if not live:
        return
    yield f"{'GPU':4}{'load':>6}  {'memory':24}{'power':>13}{'clock':>11}{'heat':>8}", "soft"
    for gpu in live:
        used, total = gpu["used_bytes"], gpu["total_bytes"] or gpu["used_bytes"]
        cap = f"/{gpu['watts_cap']:.0f}" if gpu["watts_cap"] else ""
        cells = (
            "-" if gpu["load"] is None else f"{gpu['load']:.0%}",
            f"{_meter(used / total, 10)} {format_bytes(used)}",
            "-" if gpu["watts"] is None else f"{gpu['watts']:.0f}{cap} W",
            "-" if gpu["clock_mhz"] is None else f"{gpu['clock_mhz']} MHz",
            "-" if gpu["temperature"] is None else f"{gpu['temperature']} °C",
        )
        slow = " ".join(gpu["throttle"])
        yield (
            f"{gpu['index']:<4}{cells[0]:>6}  {cells[1]:24}{cells[2]:>13}{cells[3]:>11}{cells[4]:>8}  {slow}".rstrip(),
            "busy" if slow else "",
        )
    yield "", ""


def _ends(ends: Sequence[Document]) -> Iterator[tuple[str, str]]:
    for end in ends[:3]:
        yield (
            f"{end['at'][:16].replace('T', ' ')}  {end['cause']}: {end['summary'] or ''}",
            "bad" if end["gave_up"] else "soft",
        )


def _meter(share: float, width: int) -> str:
    filled = round(width * min(1.0, max(0.0, share)))
    return "█" * filled + "░" * (width - filled)


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _styled(text: str, style: str, color: bool) -> str:
    return f"{_STYLES[style]}{text}\x1b[0m" if color and style and text else text
