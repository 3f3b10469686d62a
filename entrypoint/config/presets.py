"""Preset files: one per model in `env/`, ``NAME=value`` lines, comments on their own lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ..errors import config_rejected

_LINE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")


def folder() -> Path:
    """`env/` of a clone, or its copy inside the installed wheel."""
    package = Path(__file__).parents[1]
    inside = package / "env"
    return inside if inside.is_dir() else package.parent / "env"


def read_all() -> dict[str, str]:
    """Text of every preset by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder().glob("*.env"))}


def parse(preset: str, text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, name, value). No quotes, no export, no expansion: what Docker's env files share.

    Raises Stop on any other line, so that a preset never means one thing here and another elsewhere.
    """
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if not match or match[2][:1] in ("'", '"') or "$" in match[2]:
            raise config_rejected(
                f"env/{preset}.env line {number}: {line!r}", "write NAME=value without quotes, export or expansion"
            )
        yield number, match[1], match[2].strip()


def describe(text: str) -> str:
    """The first comment line of a preset: what it is for."""
    for line in text.splitlines():
        if line.startswith("#"):
            return line.lstrip("# ").strip()
    return ""
