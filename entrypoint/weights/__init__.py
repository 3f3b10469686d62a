"""Weights: found, fetched, verified, repaired, remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .commands import report
    from .loader import loader_options
    from .preparation import Snapshot, prepare, repair
    from .progress import TransferProgress

__all__ = ["Snapshot", "TransferProgress", "loader_options", "prepare", "repair", "report"]

_HOME = {
    "TransferProgress": "progress",
    "Snapshot": "preparation",
    "loader_options": "loader",
    "prepare": "preparation",
    "repair": "preparation",
    "report": "commands",
}


def __getattr__(name: str) -> Any:
    # The download child imports this package for a few small modules; it must start fast.
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(name)
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
