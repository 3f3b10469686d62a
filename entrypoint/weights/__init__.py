"""Weights: found, fetched, proven, repaired, remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .commands import report
    from .common import Progress, Snapshot
    from .loading import loader_options
    from .preparing import prepare, repair

__all__ = ["Progress", "Snapshot", "loader_options", "prepare", "repair", "report"]

_HOME = {
    "Progress": "common",
    "Snapshot": "common",
    "loader_options": "loading",
    "prepare": "preparing",
    "repair": "preparing",
    "report": "commands",
}


def __getattr__(name: str) -> Any:
    # The download child imports this package for two small modules; it must start fast.
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(name)
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
