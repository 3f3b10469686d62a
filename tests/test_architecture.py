"""The rooms are the same in the import contract, in docs/architecture.md and in CONTRIBUTING, and the walks exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()
WALK = re.compile(r"^### (.+)$", re.MULTILINE)
# Rows of rooms that do not import each other, from the first that is imported to the last that imports.
Rows = list[set[str]]


def contract() -> Rows:
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    rows = [{room.strip() for room in layer.split("|")} for layer in reversed(layers)]
    return [row for row in rows if row != {"__main__"}]


def page() -> Rows:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    return [{room.strip(" /`") for room in row.split(",")} for row in rows]


def contributing() -> Rows:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    match = re.search(r"Rooms, each importing only from those before it: ([^.]+)\.", text)
    assert match is not None
    return [set(row.replace(",", " ").split()) for row in match[1].split("→")]


def test_the_page_names_the_rooms_of_the_contract_in_its_order() -> None:
    assert page() == contract()


def test_contributing_names_the_rooms_of_the_contract_in_its_order() -> None:
    assert contributing() == contract()


def test_every_file_that_the_page_names_exists() -> None:
    named = re.findall(r"`((?:entrypoint|tests)/[\w/]+\.py)`", PAGE)
    drawn = re.findall(r"^ .*?\b(\w+/\w+\.py)", PAGE, re.MULTILINE)
    assert named and drawn
    missing = [name for name in [*named, *(f"entrypoint/{name}" for name in drawn)] if not (ROOT / name).is_file()]
    assert missing == []


def test_the_walks_are_short_and_numbered() -> None:
    parts = WALK.split(PAGE)[1:]
    steps = {title: re.findall(r"^\d+\. `(entrypoint/[^`]+)`", text, re.MULTILINE) for title, text in pairs(parts)}
    assert [len(files) for files in steps.values()] == [len(set(files)) for files in steps.values()]
    lengths = list(steps.values())
    assert len(lengths) == 3 and len(lengths[0]) <= 10 and len(lengths[1]) <= 14


def pairs(parts: list[str]) -> list[tuple[str, str]]:
    return list(zip(parts[::2], parts[1::2], strict=True))
