"""`relaunch doctor`: read the host once, judge what was read. Changes nothing, starts nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..config import loading
from ..errors import Stop
from ..host import discover
from . import gpu_checks, host_checks, kernel_checks, read_host
from .checks import Check
from .host_report import HostReport


def examine(environ: Mapping[str, str]) -> dict[str, Any]:
    """The doctor document. Raises Stop for settings that cannot be read at all; everything else is a verdict."""
    loaded = loading.load(environ)
    # Doctor looks at this host: a recorded one cannot be examined.
    loaded = replace(loaded, settings=loaded.settings.model_copy(update={"gpu_inventory": None}))
    box = discover.current(None, environ)
    refused: list[Check] = []
    try:
        loaded = loading.resolve_preset(loaded, len(box.gpus), environ, recorded=box.recorded)
    except Stop as stop:
        refused.append(Check("model", "model", "fail", stop.message, stop.next_step))
    host = read_host.read(loaded, box, environ)
    compiled: list[Check] = []
    if host.device == "cuda":  # the CPU engine runs none of the GPU code
        compiled = kernel_checks.checks(loaded.settings.cache_dir, [gpu.sm for gpu in box.gpus], environ)
    return document([*refused, *judge(host), *compiled])


def judge(host: HostReport) -> list[Check]:
    """The verdicts on what was read. Pure."""
    return [*gpu_checks.checks(host), *host_checks.checks(host)]


def document(checks: Iterable[Check]) -> dict[str, Any]:
    """The checks as `doctor --json` prints them; ``ok`` is false only when something fails."""
    rows = [check.document() for check in checks]
    return {"ok": all(row["verdict"] != "fail" for row in rows), "checks": rows}
