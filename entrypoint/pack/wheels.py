"""Which wheel of each locked package runs on this interpreter, where the configured index has it, how big it is."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from ..errors import Stop

Python = tuple[int, int]

# The newest C library that a wheel may ask for: Ubuntu 22.04 and Debian 12 have it.
GLIBC = (2, 35)
_LEGACY = {
    "manylinux_2_17_x86_64": "manylinux2014_x86_64",
    "manylinux_2_12_x86_64": "manylinux2010_x86_64",
    "manylinux_2_5_x86_64": "manylinux1_x86_64",
}


@dataclass(frozen=True)
class LockedWheel:
    """One wheel of a lock. ``address``: where the index has it, or a path of this machine. ``size`` in bytes, 0 where
    the index does not say."""

    name: str
    version: str
    file: str
    sha256: str
    address: str
    size: int


@cache
def tags(python: Python) -> Mapping[Tag, int]:
    """Tags that fit CPython ``python`` on x86_64 Linux, with their rank: the lowest is the best."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC[1], 4, -1)] + ["linux_x86_64"]
    platforms = [name for platform in platforms for name in (platform, _LEGACY.get(platform)) if name]
    own = f"cp{python[0]}{python[1]}"
    fitting = [*cpython_tags(python, platforms=platforms), *compatible_tags(python, own, platforms)]
    return {tag: rank for rank, tag in reversed(list(enumerate(fitting)))}


def rank(file: str, python: Python) -> int | None:
    """Return how well the wheel of that name fits; None when it does not."""
    known = tags(python)
    return min((known[tag] for tag in parse_wheel_filename(file)[3] if tag in known), default=None)


def choose(files: Iterable[str], python: Python) -> str:
    """Return the best wheel. Raises ValueError when none fits."""
    # Of two equally good ones the later in the alphabet: with build numbers, the higher.
    fitting = sorted(((rank(file, python), file) for file in files if rank(file, python) is not None), reverse=True)
    if not fitting:
        raise ValueError(f"no wheel for CPython {python[0]}.{python[1]} on x86_64 Linux")
    return fitting[-1][1]


def locked(lock: Path, python: Python, uv: str | Path) -> list[LockedWheel]:
    """Return the wheels of a hashed lock, as uv finds them (PEP 751) at whatever index it is configured for. Raises
    CalledProcessError with uv's words above, ValueError naming a package without a wheel."""
    command = [str(uv), "pip", "compile", "--quiet", "--no-deps", "--no-header", "--format", "pylock.toml"]
    command += ["--python-version", f"{python[0]}.{python[1]}", "--python-platform", f"x86_64-manylinux_2_{GLIBC[1]}"]
    done = subprocess.run([*command, str(lock)], stdout=subprocess.PIPE, text=True, check=True)
    return list(_chosen(tomllib.loads(done.stdout).get("packages", ()), python))


def _chosen(packages: Iterable[Mapping[str, Any]], python: Python) -> Iterator[LockedWheel]:
    for package in packages:
        wheels = {_file(wheel): wheel for wheel in package.get("wheels", ())}
        try:
            file = choose(wheels, python)
        except ValueError as error:
            raise ValueError(f"{package['name']} {package['version']}: {error}") from None
        wheel = wheels[file]
        address = str(wheel.get("url") or wheel["path"])
        digest, size = wheel["hashes"]["sha256"], int(wheel.get("size", 0))
        yield LockedWheel(package["name"], package["version"], file, digest, address, size)


def _file(wheel: Mapping[str, Any]) -> str:
    address = str(wheel.get("url") or wheel.get("path"))
    return str(wheel.get("name") or address.rpartition("/")[2].replace("%2B", "+"))


def of_clone(root: Path, work: Path) -> list[LockedWheel]:
    """Return every wheel that `./relaunch` of the clone ``root`` installs for its verbs: those of the engine's and the
    gateway's lock, and uv. ``work`` takes a small file. Raises Stop (69) when the index cannot be asked."""
    python = sys.version_info[:2]
    dev = (root / "locks/dev.txt").read_text()
    tool = work / "uv.txt"
    tool.write_text(next(block for block in _blocks(dev) if block.startswith("uv==")))
    found: dict[str, LockedWheel] = {}
    try:
        for lock in (root / "locks/engine.txt", root / "locks/gateway.txt", tool):
            for wheel in locked(lock, python, Path(sys.prefix) / "bin/uv"):
                found[wheel.file] = wheel
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise Stop(
            "hub_unavailable",
            f"the wheels of the locks could not be found: {error}",
            "uv's own message is above; it asks the package index that UV_DEFAULT_INDEX or uv.toml names",
        ) from None
    finally:
        tool.unlink()
    return [found[file] for file in sorted(found)]


def _blocks(lock: str) -> list[str]:
    """The requirements of a lock, each with the lines of its digests."""
    blocks: list[str] = []
    for line in lock.splitlines(keepends=True):
        if line[:1].isspace() and blocks:
            blocks[-1] += line
        else:
            blocks.append(line)
    return blocks
