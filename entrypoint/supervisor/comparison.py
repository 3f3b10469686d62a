"""`relaunch plan --compare OTHER`: this plan beside the one that another version makes or made of the same settings."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import loading
from ..errors import Stop, config_rejected, from_os_error, unreadable
from ..host import discover
from ..plan import compare

# A clone that was never started installs its runtime lock first.
SECONDS = 900.0
# The most of a plan document that is read, in bytes: one of 64 GPUs has 60 kB.
MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class Other:
    """What OTHER said: its plan document, and its `relaunch config` document where it is a program."""

    name: str
    plan: Mapping[str, Any]
    config: Mapping[str, Any] | None = None


def compare_with(other: str, plan: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return ``{"other", "same", "plan", "changes": [{"part", "name", "from", "to", "reason"}]}``: from OTHER's plan to
    ``plan``, which is this version's. ``other`` is a file with a plan document, ``-`` for one on the standard input, or
    another version: its ``relaunch`` command or the clone that has it, which is asked with the settings of ``environ``.
    Raises Stop: 66 when it cannot be read, 78 when the other version refuses these settings."""
    told = _read(other, environ)
    found = compare.plans(told.plan, plan)
    if told.config is not None:
        found = compare.settings(told.config, _config(environ)) + found
    return {
        "other": told.name,
        "same": not found,
        "changes": [difference.document() for difference in found],
        "plan": plan,
    }


def _config(environ: Mapping[str, str]) -> dict[str, Any]:
    """As `relaunch config` has it: with the preset that is chosen where neither a preset nor a model is set."""
    loaded = loading.load(environ)
    if not (loaded.settings.preset or loaded.settings.model):
        box = discover.current(loaded.settings.gpu_inventory, environ)
        loaded = loading.resolve_preset(loaded, len(box.gpus), environ, recorded=box.recorded)
    return loaded.document()


def _read(other: str, environ: Mapping[str, str]) -> Other:
    if other == "-":
        return Other("standard input", _document(sys.stdin.read(MAX_BYTES + 1), "standard input"))
    path = Path(other)
    program = path / "relaunch" if path.is_dir() else path
    try:
        with program.open("rb") as file:
            head = file.read(2)
            if head != b"#!":
                text = (head + file.read(MAX_BYTES)).decode("utf-8", "replace")
                return Other(other, _document(text, other))
    except OSError as error:
        raise from_os_error(error, program, "--compare") from None
    return Other(other, _ask(program, ("plan", "--json"), environ), _ask(program, ("config", "--json"), environ))


def _document(text: str, source: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
        if len(text) <= MAX_BYTES and "feasible" in document and "engine" in document:
            return dict(document)
    except (ValueError, TypeError, RecursionError):
        pass
    raise unreadable(f"{source} has no plan document", "write one with `relaunch plan --json > FILE` there")


def _ask(program: Path, words: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, Any]:
    """The JSON that another version prints. A plan that does not fit is printed too (exit 78)."""
    command = [str(program.absolute()), *words]
    try:
        done = subprocess.run(
            command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
        )
    except OSError as error:
        raise from_os_error(error, program, "--compare") from None
    except subprocess.TimeoutExpired:
        raise Stop("config_rejected", f"{program} gave no plan in {SECONDS:.0f} s", "run it there by hand") from None
    try:
        document = json.loads(done.stdout)
    except ValueError:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise config_rejected(
            f"{' '.join(command)} says: {said[-1].removeprefix('relaunch: ')}",
            "settings that only one of the versions knows cannot be compared with the other: take them out for this",
        ) from None
    return dict(document)
