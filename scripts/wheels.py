"""Write `locks/wheels.json` from the locks: one wheel a package, for CPython 3.12 on x86_64 Linux, as the flake wants.

Only file names and digests are kept: where a wheel lies is known to whoever installs it. Needs network through uv,
with whatever index uv is configured for; changes nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from entrypoint.pack import wheels

ROOT = Path(__file__).resolve().parents[1]
# runtime.txt is a part of each; dev.txt is for the flake's checks and its shell.
LOCKS = ("engine", "gateway", "dev")
PYTHON = (3, 12)


def document(uv: str) -> tuple[list[dict[str, str]], dict[str, str]]:
    """(rows of wheels.json, address by file name). Raises ValueError when two locks disagree."""
    by_name: dict[str, dict[str, str]] = {}
    addresses: dict[str, str] = {}
    for lock in LOCKS:
        for wheel in wheels.locked(ROOT / f"locks/{lock}.txt", PYTHON, uv):
            row = {"name": wheel.name, "version": wheel.version, "file": wheel.file, "sha256": wheel.sha256}
            if by_name.setdefault(wheel.name, row) != row:
                raise ValueError(f"{wheel.name} differs between locks/{' and '.join(LOCKS)}")
            addresses[wheel.file] = wheel.address
    return [by_name[name] for name in sorted(by_name)], addresses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--addresses", type=Path, help="write address by file name here, and no wheels.json")
    arguments = parser.parse_args()
    rows, addresses = document(os.environ.get("UV", str(ROOT / ".venv/bin/uv")))
    if arguments.addresses:
        arguments.addresses.write_text(json.dumps(addresses, indent=1, sort_keys=True) + "\n")
    else:
        lines = ",\n".join(" " + json.dumps(row) for row in rows)
        (ROOT / "locks/wheels.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
