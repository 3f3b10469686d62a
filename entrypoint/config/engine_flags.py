"""sglang's flags as its own parser knows them, and the check of `RELAUNCH_ENGINE_ARGS` against them.

`engine_flags.json` is generated from the pinned engine's argparse parser (`scripts/engine_flags.py`; a test
regenerates it).
"""

from __future__ import annotations

import difflib
import json
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import Stop, config_rejected

# Flags that a setting owns: the supervisor relies on their values, so there is one place to give them.
OWNED = {
    "model_path": "RELAUNCH_MODEL",
    "revision": "RELAUNCH_REVISION",
    "served_model_name": "RELAUNCH_SERVED_MODEL_NAME",
    "host": "RELAUNCH_HOST",
    "port": "RELAUNCH_PORT",
    "api_key": "RELAUNCH_API_KEY",
    # A secret on a command line stands in every process listing.
    "admin_api_key": "RELAUNCH_ADMIN_API_KEY",
    "ssl_keyfile_password": "a key file without a password, mounted as a secret",
    "config": "the RELAUNCH_ settings",
    "nnodes": "RELAUNCH_NNODES",
    "node_rank": "RELAUNCH_NODE_RANK",
    "dist_init_addr": "RELAUNCH_DIST_INIT_ADDR",
    "help": "docs/settings.md",
}


@dataclass(frozen=True)
class Flag:
    """One flag of the engine. ``nargs``: 0 takes no value, 1 takes one, ``*`` takes any number."""

    options: tuple[str, ...]
    dest: str
    nargs: int | str
    default: Any
    choices: tuple[Any, ...] | None
    type: str | None

    @property
    def option(self) -> str:
        """The longest ``--`` spelling: full names never become ambiguous prefixes."""
        return max((o for o in self.options if o.startswith("--")), key=len)


@dataclass(frozen=True)
class Given:
    """One flag as given: ``tokens`` are the words for the command line."""

    flag: Flag
    tokens: tuple[str, ...]

    @property
    def value(self) -> str | bool:
        """The single value, or True/False for a flag that takes none."""
        if len(self.tokens) > 1:
            return self.tokens[1]
        return not self.tokens[0].startswith("--no-")


@cache
def table() -> dict[str, Flag]:
    """Every option string of the pinned engine."""
    rows = json.loads(Path(__file__).with_name("engine_flags.json").read_text(encoding="utf-8"))
    flags: dict[str, Flag] = {}
    for row in rows["flags"]:
        choices = tuple(row["choices"]) if row.get("choices") is not None else None
        flag = Flag(tuple(row["options"]), row["dest"], row["nargs"], row.get("default"), choices, row.get("type"))
        flags.update(dict.fromkeys(flag.options, flag))
    return flags


def engine_version() -> str:
    """The sglang version that the table was generated from."""
    return str(json.loads(Path(__file__).with_name("engine_flags.json").read_text(encoding="utf-8"))["sglang"])


def parse(text: str, origin: str = "RELAUNCH_ENGINE_ARGS") -> list[Given]:
    """The flags in ``text``. Raises Stop (78) at the first that the engine would refuse."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise config_rejected(f"{origin} cannot be split into words: {error}", "check its quotes") from None
    given: list[Given] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        name, has_value, attached = word.partition("=")
        if not name.startswith("-") or _is_number(name):
            # The word itself may be a secret whose quotes went wrong.
            before = words[position - 2].partition("=")[0] if position > 1 else ""
            after = f" after {before}" if before.startswith("--") else ""
            raise config_rejected(f"{origin}: word {position}{after} belongs to no flag", "write --flag value")
        flag = _find(name, origin)
        if name not in flag.options:
            name = flag.option
        if flag.dest in OWNED:
            raise config_rejected(f"{origin}: {name} is not taken there", f"use {OWNED[flag.dest]}")
        if any(earlier.flag.dest == flag.dest for earlier in given):
            raise config_rejected(f"{origin}: {name} is given twice", "keep one of them")
        values = [attached] if has_value else []
        while not has_value and position < len(words) and flag.nargs != 0 and not _is_flag(words[position]):
            values.append(words[position])
            position += 1
            if flag.nargs in (1, "?"):
                break
        _check(flag, name, values, has_value != "", origin)
        given.append(Given(flag, (name, *values)))
    return given


def _check(flag: Flag, name: str, values: list[str], attached: bool, origin: str) -> None:
    if flag.nargs == 0:
        if attached:
            raise config_rejected(f"{origin}: {name} takes no value", f"write {name} alone")
        return
    if not values and flag.nargs not in ("*", "?"):
        raise config_rejected(f"{origin}: {name} needs a value", f"write {name} VALUE")
    if isinstance(flag.nargs, int) and len(values) != flag.nargs:
        raise config_rejected(f"{origin}: {name} needs {flag.nargs} values, got {len(values)}")
    for value in values:
        if flag.choices is not None and value not in [str(choice) for choice in flag.choices]:
            choices = ", ".join(str(choice) for choice in flag.choices)
            raise config_rejected(f"{origin}: {name} does not know {value!r}", f"it knows {choices}")
        if flag.type in ("int", "float") and not _is_number(value, whole=flag.type == "int"):
            raise config_rejected(f"{origin}: {name} needs a number, got {value!r}")


def _find(name: str, origin: str) -> Flag:
    """The flag called ``name``, or the only one that begins so: argparse takes such a prefix, and people write
    ``--tp 8``. The command line gets the full name, which no later flag can make ambiguous."""
    flag = table().get(name)
    if flag is not None:
        return flag
    begins = {f.dest: f for option, f in table().items() if name.startswith("--") and option.startswith(name)}
    if len(begins) != 1:
        raise _unknown(name, origin)
    return next(iter(begins.values()))


def _unknown(name: str, origin: str) -> Stop:
    near = difflib.get_close_matches(name, list(table()), 3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else "see `python -m sglang.launch_server --help`"
    return config_rejected(f"{origin}: sglang {engine_version()} has no flag {name}", hint)


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _is_number(word)


def _is_number(word: str, *, whole: bool = False) -> bool:
    try:
        int(word) if whole else float(word)
    except ValueError:
        return False
    return True
