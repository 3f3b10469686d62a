"""Weights: found, fetched, proven, repaired, remembered."""

from .common import Progress, Snapshot
from .prepare import prepare, repair

__all__ = ["Progress", "Snapshot", "prepare", "repair"]
