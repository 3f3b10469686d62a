"""Compiled kernels on their way to another machine with the same installation at the same path.

Their libraries ask whether a kernel is older than its sources and whether its build file still says the same; both
name paths and times of the installed packages, and an installation makes those times anew. So they are set back.
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

from . import cuda_home, kernels, prepare

# Byte code is checked against the time of its source.
_KEPT = (".py", ".pyc")


def describe(cache_dir: Path) -> dict[str, Any] | None:
    """Return which kernels of this installation are compiled under ``cache_dir``, and what the other side must have;
    None when there are none, or no engine."""
    place = kernels.directory(cache_dir)
    compiler = cuda_home.wheels()
    if not kernels.has_engine() or compiler is None or not prepare.is_filled(place):
        return None
    return {
        "directory": place.name,
        "cache_dir": str(cache_dir.absolute()),
        "compiler_mtime_ns": (compiler / "bin/nvcc").stat().st_mtime_ns,
    }


def write(cache_dir: Path, target: Path) -> None:
    """Write the compiled kernels as a tar archive. Raises OSError."""
    place = kernels.directory(cache_dir)
    with tarfile.open(target, "w") as archive:
        archive.add(place, place.name, filter=_whole_seconds)


def _whole_seconds(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Ninja takes a result for outdated that is newer than its log says, if only by a nanosecond."""
    member.mtime = int(member.mtime)
    return member


def obstacle(carried: dict[str, Any], cache_dir: Path) -> str | None:
    """Return why kernels that were packed elsewhere cannot be used here; None when they can."""
    if str(cache_dir.absolute()) != carried["cache_dir"]:
        return f"they were compiled for RELAUNCH_CACHE_DIR={carried['cache_dir']}"
    if kernels.directory(cache_dir).name != carried["directory"]:
        return "they were compiled for an installation at another path, or of other packages"
    return None


def read(carried: dict[str, Any], archive: Path, cache_dir: Path) -> None:
    """Unpack the kernels unless some are there, and set the times of this installation back. Raises OSError."""
    place = kernels.directory(cache_dir)
    if not prepare.is_filled(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as file:
            # Debian 12's Python 3.11.2 knows no filters: as an argument it would be refused, as an attribute it is not.
            file.extraction_filter = getattr(tarfile, "tar_filter", None)
            file.extractall(place.parent)
    _set_back(Path(sysconfig.get_path("purelib")), int(carried["compiler_mtime_ns"]))


def _set_back(root: Path, mtime_ns: int) -> None:
    """No source is newer than the compiler was, which itself gets exactly its time: the CUDA_HOME is named by it."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                if not name.endswith(_KEPT) and os.stat(path).st_mtime_ns > mtime_ns:
                    os.utime(path, ns=(mtime_ns, mtime_ns))
    if (compiler := cuda_home.wheels()) is not None:
        os.utime(compiler / "bin/nvcc", ns=(mtime_ns, mtime_ns))
