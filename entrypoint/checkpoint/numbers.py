"""Sizes read from a config.json, which may hold anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LARGEST = 1 << 48


def number(value: Any, default: float) -> float:
    """``value`` when it is a positive number that a size can be, else ``default``: configs hold nulls, lists,
    strings and numbers of a hundred digits."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST
    return value if ok else default


def whole(config: Mapping[str, Any], *keys: str, default: int = 0) -> int:
    """The first of ``keys`` that holds a positive number."""
    for key in keys:
        value = number(config.get(key), 0)
        if value:
            return int(value)
    return default
