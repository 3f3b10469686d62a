"""Settings as one run has them: read from the environment, else from the preset, else the default; with the origin."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import Stop, config_rejected, unreadable
from ..scrub import without_user
from . import presets as preset_files
from .engine_flags import Given, parse
from .schema import MASK, PREFIX, RECORDS, Settings

# What every server and client takes in an Authorization header; sglang compares keys as ASCII alone.
LONGEST_SECRET = 4096
_SECRET = re.compile(rf"[\x21-\x7e]{{1,{LONGEST_SECRET}}}")


@dataclass(frozen=True)
class Loaded:
    """Settings with their origin. ``sources`` maps a field to environment, preset or default; ``environment`` holds
    the names that are passed on to the engine from the preset."""

    settings: Settings
    sources: dict[str, str]
    environment: dict[str, str]
    notes: tuple[str, ...] = ()

    def changed(self, values: Mapping[str, Any], engine_args: tuple[Given, ...]) -> Loaded:
        """A copy with other validated ``values``, as if the environment had given them, and other ENGINE_ARGS."""
        text = shlex.join(word for given in engine_args for word in given.tokens)
        settings = self.settings.model_copy(update={**values, "engine_args": text})
        copy = replace(self, settings=settings, sources={**self.sources, **dict.fromkeys(values, "environment")})
        copy.__dict__["engine_args"] = engine_args  # parsed already
        return copy

    @cached_property
    def engine_args(self) -> tuple[Given, ...]:
        """ENGINE_ARGS as flags of the engine, parsed once. Raises Stop (78) at the first that it would refuse."""
        return tuple(parse(self.settings.engine_args))

    def check_engine_args(self) -> None:
        """Raise Stop (78) for ENGINE_ARGS that the engine would refuse, before anything is looked at."""
        _ = self.engine_args

    def is_user_set(self, field: str) -> bool:
        """True when the environment or the preset gave the value and it is not ``auto``."""
        return self.sources[field] != "default" and getattr(self.settings, field) != "auto"

    def document(self) -> dict[str, Any]:
        """The JSON of ``relaunch config``; set secrets are masked."""
        rows = []
        for field, record in RECORDS.items():
            value = getattr(self.settings, field)
            if record.secret and value is not None:
                value = MASK
            elif isinstance(value, Path):
                value = str(value)
            elif field == "engine_args":
                value = _masked(value)
            elif field == "give_up_command" and value:
                value = f"{value.split()[0]} {MASK}" if len(value.split()) > 1 else value
            elif field == "model" and value:
                value = without_user(value)
            rows.append(
                {
                    "name": record.name,
                    "value": value,
                    "source": self.sources[field],
                    "default": record.default,
                    "secret": record.secret,
                    "help": record.help,
                }
            )
        return {"preset": self.settings.preset, "settings": rows}


# Parts of the names of flags whose values may be secrets: keys, tokens, and JSON that holds credentials of a storage.
_SENSITIVE = ("key", "api", "password", "secret", "storage-backend-extra-config")


def mask_flags(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with every value of a key, token or password flag masked."""
    shown, hide = [], False
    for word in words:
        flag, given, _ = word.partition("=")
        if not word.startswith("--"):
            shown.append(MASK if hide else word)
            continue
        sensitive = any(mark in flag.lower().replace("fastapi", "") for mark in _SENSITIVE)
        shown.append(f"{flag}={MASK}" if sensitive and given else word)
        hide = sensitive and not given and not flag.endswith(("keyfile", "keyfile-path"))
    return shown


def _masked(text: str) -> str:
    """ENGINE_ARGS as `relaunch config` shows them."""
    try:
        return " ".join(w if w.endswith(MASK) else shlex.quote(w) for w in mask_flags(shlex.split(text)))
    except ValueError:  # a quote without its pair
        return MASK


def load(environ: Mapping[str, str], presets: Mapping[str, str], chosen: str | None = None) -> Loaded:
    """Merge environment, secret files and preset into validated settings.

    ``presets`` maps a preset's name to the text of its file; ``chosen`` is the preset when the environment names
    none. Raises Stop (78, or 66 for a secret file that cannot be read) with one line that names the variable, its
    origin and what to do.
    """
    given = _from_environment(environ)
    preset = given.get("preset") or chosen
    preset_values: dict[str, str] = {}
    passed: dict[str, str] = {}
    if preset is not None:
        if preset not in presets:
            near = difflib.get_close_matches(preset, presets, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(presets))}"
            raise config_rejected(f"{PREFIX}PRESET={preset} names no file of env/", hint)
        preset_values, passed = _from_preset(preset, presets[preset])
    sources = {
        field: "environment" if field in given else "preset" if field in preset_values else "default"
        for field in RECORDS
    }
    merged = {**preset_values, **given}
    try:
        settings = Settings.model_validate({"preset": preset, **merged})
    except ValidationError as error:
        raise _explain(error, merged, sources, preset) from None
    _check_together(settings)
    return Loaded(settings, sources, {k: v for k, v in passed.items() if k not in environ})


_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s:/?#@\[\]]+):(\d{1,5})")


def _check_together(settings: Settings) -> None:
    """Settings that are right alone and wrong together."""
    if settings.port == settings.control_port:
        raise config_rejected(f"RELAUNCH_PORT and RELAUNCH_CONTROL_PORT are both {settings.port}", "give each its own")
    if settings.node_rank >= settings.nnodes:
        raise config_rejected(
            f"RELAUNCH_NODE_RANK={settings.node_rank} with RELAUNCH_NNODES={settings.nnodes}",
            f"ranks go from 0 to {settings.nnodes - 1}",
        )
    for field in ("dist_init_addr", "group_head"):
        address = getattr(settings, field)
        found = _ADDRESS.fullmatch(address) if address else None
        if address and (found is None or not 0 < int(found[1]) < 65536):
            raise config_rejected(
                f"{RECORDS[field].name}={address} is no address",
                "write host:port, an IPv6 address in brackets: [fd00::1]:20000",
            )
    if settings.nnodes > 1 and settings.dist_init_addr is None:
        raise config_rejected(
            f"RELAUNCH_NNODES={settings.nnodes} without RELAUNCH_DIST_INIT_ADDR",
            "set host:port of node 0, the same on every node",
        )


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for name, value in environ.items():
        if not name.startswith(PREFIX):
            continue
        field = name.removeprefix(PREFIX).lower()
        secret_field = field.removesuffix("_file")
        if field in RECORDS:
            # An empty value is how compose and systemd write "not set".
            if value.strip():
                given[field] = value.strip()
        elif field.endswith("_file") and secret_field in RECORDS and RECORDS[secret_field].secret:
            if value.strip():
                if environ.get(PREFIX + secret_field.upper(), "").strip():
                    raise config_rejected(f"{name} and {name.removesuffix('_FILE')} are both set", "keep one of them")
                given[secret_field] = _read_secret(name, value.strip())
        else:
            raise _unknown(name, f"{name} in the environment")
    for field, value in given.items():
        if RECORDS[field].secret and not _SECRET.fullmatch(value):
            raise config_rejected(
                f"{RECORDS[field].name} has a space, a line break or a character that is not ASCII, or more than "
                f"{LONGEST_SECRET} of them: no HTTP header carries it",
                "give one line of printable ASCII characters without spaces",
            )
    return given


def _read_secret(name: str, path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        # A secret is easily given in place of its file: only what looks like a path is repeated.
        where = f"{name}={path}" if path.startswith(("/", "./", "~")) else f"the file that {name} names"
        raise unreadable(f"{where} cannot be read: {reason}", "mount the secret file, readable for this user") from None
    if not text:
        raise config_rejected(f"{name}={path} is empty", "write the secret into it")
    return text


def _from_preset(preset: str, text: str) -> tuple[dict[str, str], dict[str, str]]:
    values: dict[str, str] = {}
    passed: dict[str, str] = {}
    for number, name, value in preset_files.parse(preset, text):
        field = name.removeprefix(PREFIX).lower()
        if not name.startswith(PREFIX):
            passed[name] = value
        elif field in RECORDS and field != "preset" and not RECORDS[field].secret:
            values[field] = value
        else:
            raise _unknown(name, f"{name} in env/{preset}.env line {number}")
    return values, passed


def _unknown(name: str, where: str) -> Stop:
    names: Iterable[str] = [r.name for r in RECORDS.values()] + [r.name + "_FILE" for r in RECORDS.values() if r.secret]
    near = difflib.get_close_matches(name, list(names), 1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "see docs/settings.md, or `relaunch config`"
    return config_rejected(f"{where} is not a setting", hint)


def _explain(error: ValidationError, merged: Mapping[str, Any], sources: Mapping[str, str], preset: str | None) -> Stop:
    """The first bad value as one line. pydantic reports a union once per member; the last says most."""
    errors = error.errors()
    field = str(errors[0]["loc"][0])
    reasons = [e for e in errors if e["loc"][0] == field]
    reason = str(reasons[-1]["msg"]).removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    if any("auto" in str(part) for e in reasons for part in e["loc"][1:]):
        reason += ", or auto"
    value = MASK if RECORDS[field].secret else str(merged[field])
    value = value if len(value) <= 60 else f"{value[:57]}..."
    where = "the environment" if sources[field] == "environment" else f"env/{preset}.env"
    return config_rejected(f"{RECORDS[field].name}={value} (from {where}): {reason}", RECORDS[field].help.rstrip("."))
