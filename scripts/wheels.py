"""Write `locks/wheels.json` from the locks: one wheel a package, for CPython 3.12 on x86_64 Linux, as the flake wants.

Only file names and digests are kept: where a wheel lies is known to whoever installs it. Needs network through uv,
with whatever index uv is configured for; changes nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
# runtime.txt is a part of each; dev.txt is for the flake's checks and its shell.
LOCKS = ("engine", "gateway", "dev")
PYTHON = (3, 12)
# The newest C library that a wheel may ask for.
GLIBC = (2, 35)


@cache
def tags() -> dict[Tag, int]:
    """Tags that fit, with their rank: the lowest is the best."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC[1], 4, -1)] + ["linux_x86_64"]
    legacy = {
        "manylinux_2_17_x86_64": "manylinux2014_x86_64",
        "manylinux_2_12_x86_64": "manylinux2010_x86_64",
        "manylinux_2_5_x86_64": "manylinux1_x86_64",
    }
    platforms = [name for platform in platforms for name in (platform, legacy.get(platform)) if name]
    fitting = [*cpython_tags(PYTHON, platforms=platforms), *compatible_tags(PYTHON, "cp312", platforms)]
    return {tag: rank for rank, tag in reversed(list(enumerate(fitting)))}


def rank(file: str) -> int | None:
    """How well the wheel of that name fits; None when it does not."""
    ranks = [tags()[tag] for tag in parse_wheel_filename(file)[3] if tag in tags()]
    return min(ranks, default=None)


def choose(files: Iterable[str]) -> str:
    """The best wheel. Raises ValueError when none fits."""
    # Of two equally good ones the later in the alphabet: with build numbers, the higher.
    fitting = sorted(((rank(file), file) for file in files if rank(file) is not None), reverse=True)
    if not fitting:
        raise ValueError("no wheel for CPython 3.12 on x86_64 Linux")
    return fitting[-1][1]


def resolved(lock: Path, uv: str) -> list[dict[str, Any]]:
    """Packages of the lock with their files' addresses, as uv reports them (PEP 751)."""
    command = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--no-deps",
        "--no-header",
        "--format",
        "pylock.toml",
        "--python-version",
        "3.12",
        "--python-platform",
        f"x86_64-manylinux_2_{GLIBC[1]}",
        str(lock),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    packages: list[dict[str, Any]] = tomllib.loads(done.stdout)["packages"]
    return packages


def named(wheel: dict[str, Any]) -> str:
    return str(wheel.get("name") or wheel["url"].rpartition("/")[2].replace("%2B", "+"))


def rows(packages: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, str], str]]:
    """(row of wheels.json, address) of each package. Raises ValueError naming a package without a wheel."""
    for package in packages:
        wheels = {named(wheel): wheel for wheel in package.get("wheels", ())}
        try:
            file = choose(wheels)
        except ValueError as error:
            raise ValueError(f"{package['name']} {package['version']}: {error}") from None
        digest = wheels[file]["hashes"]["sha256"]
        row = {"name": package["name"], "version": package["version"], "file": file, "sha256": digest}
        yield row, wheels[file]["url"]


def document(uv: str) -> tuple[list[dict[str, str]], dict[str, str]]:
    """(rows of wheels.json, address by file name). Raises ValueError when two locks disagree."""
    by_name: dict[str, dict[str, str]] = {}
    addresses: dict[str, str] = {}
    for lock in LOCKS:
        for row, address in rows(resolved(ROOT / f"locks/{lock}.txt", uv)):
            if by_name.setdefault(row["name"], row) != row:
                raise ValueError(f"{row['name']} differs between locks/{' and '.join(LOCKS)}")
            addresses[row["file"]] = address
    return [by_name[name] for name in sorted(by_name)], addresses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--addresses", type=Path, help="write address by file name here, and no wheels.json")
    arguments = parser.parse_args()
    wheels, addresses = document(os.environ.get("UV", str(ROOT / ".venv/bin/uv")))
    if arguments.addresses:
        arguments.addresses.write_text(json.dumps(addresses, indent=1, sort_keys=True) + "\n")
    else:
        lines = ",\n".join(" " + json.dumps(row) for row in wheels)
        (ROOT / "locks/wheels.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
