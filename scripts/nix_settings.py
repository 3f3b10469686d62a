"""Write nix/settings.json, the options of the NixOS module, from the settings' own records. A test holds it to them.

python -P scripts/nix_settings.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from entrypoint.config.schema import RECORDS, Settings

FILE = Path(__file__).parent.parent / "nix/settings.json"
# The unit owns these two directories (StateDirectory=, CacheDirectory=).
OWNED = ("state_dir", "cache_dir")


def choices(field: str) -> list[str]:
    """The words that the setting takes, when it takes nothing else."""
    annotation = Settings.model_fields[field].annotation
    return [str(word) for word in get_args(annotation)] if get_origin(annotation) is Literal else []


def row(field: str) -> dict[str, Any]:
    record = RECORDS[field]
    default = "on" if record.default is True else "off" if record.default is False else record.default
    shown = None if default in (None, "") else str(default)
    return {"help": record.help, "default": shown, "choices": choices(field), "secret": record.secret}


def render() -> str:
    rows = {field: row(field) for field in RECORDS if field not in OWNED}
    return json.dumps(rows, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(render())
