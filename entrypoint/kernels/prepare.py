"""Ready the caches of compiled kernels before an engine starts: the CUDA_HOME, what the image brought, no leftovers."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from . import cuda_home, kernels

# An image may carry compiled kernels here; they are copied, since the cache is a volume that outlives the image.
IMAGE_KERNELS = Path("/opt/relaunch/warm")
PROBE_BYTES = 1 << 20
# A directory of another installation that nobody has started from for this long is removed.
KEEP_SECONDS = 14 * 86400.0


def prepare(
    cache_dir: Path, in_use: Path, environ: Mapping[str, str], image_kernels: Path = IMAGE_KERNELS
) -> list[str]:
    """Make CUDA_HOME, bring in the image's kernels, remove old directories beside ``in_use``. Returns one sentence for
    each thing done. Raises OSError when the cache cannot be written."""
    done = []
    probe(cache_dir)
    place = kernels.directory(cache_dir)
    cuda_home.ensure(cache_dir, environ)
    if seed(place, image_kernels):
        done.append(f"took the kernels that the image carries into {place}")
    for path in (in_use, place):
        path.mkdir(parents=True, exist_ok=True)
        os.utime(path)
    done += [f"removed kernels of an older installation: {old}" for old in collect(cache_dir / "jit", {in_use, place})]
    return done


def probe(directory: Path) -> None:
    """Raise OSError unless one more MiB can really be written there: a full disk is found now and named, not by a
    compiler half an hour later."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f".probe.{os.getpid()}"
    try:
        with file.open("wb") as stream:
            stream.write(bytes(PROBE_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
    finally:
        with contextlib.suppress(OSError):
            file.unlink()


def is_filled(place: Path) -> bool:
    """True when something was compiled into ``place`` already."""
    return (place / ".cache").exists() or (place / "sglang").exists()


def seed(place: Path, image_kernels: Path = IMAGE_KERNELS) -> bool:
    """Copy the image's kernels to ``place`` unless they are there. True when copied."""
    source = image_kernels / place.name
    if is_filled(place) or not source.is_dir():
        return False
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    # With times: the libraries compare them with those of their sources.
    shutil.copytree(source, draft, symlinks=True)
    shutil.rmtree(place, ignore_errors=True)  # made, but nothing in it
    try:
        draft.rename(place)
    except OSError:  # another process was first
        shutil.rmtree(draft, ignore_errors=True)
        return False
    return True


def collect(root: Path, keep: set[Path], older_than: float = KEEP_SECONDS) -> list[Path]:
    """Remove directories of ``root`` that nobody started from for ``older_than`` seconds. Returns them."""
    removed = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path in keep or not path.is_dir():
            continue
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > older_than:
                shutil.rmtree(path)
                removed.append(path)
    return removed
