"""`relaunch unpack`: prove a pack, put its parts in their places, and say how to serve from them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import loading
from ..config.settings import Loaded
from ..errors import Stop, config_rejected, from_os_error
from ..kernels import carry
from ..weights import hub
from . import contents, image, make, weights
from .contents import Item, Reports

# Locks beside the runtime's, which the wrapper has installed from the pack by the time that this runs.
LOCKS = ("engine", "gateway")
# Bytes on the disk for each byte of a wheel: 9.5 GB of 4.3 GB for the engine's lock.
UNPACKED = 2.2


def unpack(folder: Path, environ: Mapping[str, str], shown: Reports, *, check: bool = False) -> dict[str, str]:
    """Prove every file of the pack ``folder``; unless ``check``, install its packages and place weights and kernels,
    each only where it is not there yet. Returns the settings to serve with, beside the user's own. Raises Stop: 65 for
    a damaged file, 66 for a missing one, 73 before anything is written when a disk is too small, 78 for a pack of
    another version or another Python."""
    document = make.read(folder)
    root = make.clone()
    _fits(document, root)
    loaded = loading.load({**document["settings"], **environ})
    known = contents.sums(folder)
    place, items = _weights(folder, document, known, loaded, environ)
    contents.need_space(_space(folder, root, loaded, place, items), "HF_HOME, RELAUNCH_CACHE_DIR or TARGET")
    contents.prove(folder, known, shown)
    shown.line(f"relaunch: {len(known)} files of the pack are what was packed")
    settings = dict(document["settings"])
    if document["weights"] and document["weights"]["kind"] == "directory":
        settings["RELAUNCH_MODEL"] = str(place / document["weights"]["folder"])
    if check:
        return settings
    for lock in LOCKS:
        _install(root, lock)
    try:
        _place(place, items, document, shown)
        _kernels(folder, document, loaded.settings.cache_dir, shown)
    except OSError as error:
        raise from_os_error(error, Path(error.filename or place), "RELAUNCH_CACHE_DIR or HF_HOME") from None
    if document["image"]:
        shown.line(f"relaunch: {image.load(folder / document['image']['file'])}")
    return settings


def _fits(document: Mapping[str, Any], root: Path) -> None:
    here = "{}.{}".format(*sys.version_info[:2])
    if document["python"] != here:
        raise config_rejected(
            f"this pack is for CPython {document['python']}, and this is {here}",
            f"remove .venv and set RELAUNCH_PYTHON to a CPython {document['python']}",
        )
    if document["locks"] != make.locks(root):
        raise config_rejected(
            f"the locks of the clone {root} are not those of the pack (relaunch {document['version']})",
            "run the pack's own command: sh PACK/unpack TARGET",
        )


def _weights(
    folder: Path, document: Mapping[str, Any], known: Mapping[str, str], loaded: Loaded, environ: Mapping[str, str]
) -> tuple[Path, list[Item]]:
    """Where the weights belong, and the files to put there."""
    carried = document["weights"]
    if not carried:
        return loaded.settings.cache_dir, []
    place = hub.read(loaded, environ).cache if carried["kind"] == "hub" else loaded.settings.cache_dir / "models"
    prefix = f"{weights.FOLDER}/"
    return place, [
        contents.copied(folder / path, path.removeprefix(prefix), digest)
        for path, digest in known.items()
        if path.startswith(prefix)
    ]


def _space(folder: Path, root: Path, loaded: Loaded, place: Path, items: list[Item]) -> dict[Path, int]:
    """Bytes to write, by directory."""
    wheels = sum(path.stat().st_size for path in folder.glob("wheels/*.whl"))
    installed = all(_installed(root, lock) for lock in LOCKS)
    kernels = folder / make.KERNEL_ARCHIVE
    left = contents.missing(place, items, {item.path: item.digest or "" for item in items})
    return {
        root: 0 if installed else int(wheels * UNPACKED),
        place: contents.bytes_left(place, left),
        loaded.settings.cache_dir / "jit": kernels.stat().st_size if kernels.exists() else 0,
    }


def _installed(root: Path, lock: str) -> bool:
    kept, wanted = root / f".venv/{lock}.txt", root / f"locks/{lock}.txt"
    return kept.is_file() and kept.read_bytes() == wanted.read_bytes()


def _install(root: Path, lock: str) -> None:
    """As `./relaunch` does it; the wrapper has told uv to take nothing from anywhere but the pack."""
    if _installed(root, lock):
        return
    done = subprocess.run([sys.executable, "-P", str(root / "scripts/install.py"), lock], cwd=root)
    if done.returncode:
        raise Stop("hub_unavailable", f"locks/{lock}.txt could not be installed from the pack", "see the lines above")
    importlib.invalidate_caches()


def _place(place: Path, items: list[Item], document: Mapping[str, Any], shown: Reports) -> None:
    """Copy the weights, each read back, and make the links of the hub's cache."""
    carried = document["weights"]
    if not carried:
        return
    left = contents.missing(place, items, {item.path: item.digest or "" for item in items})
    contents.write(place, left, "HF_HOME", shown, note=False)
    for path, target in carried["links"].items():
        link = place / carried["folder"] / path
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(target)
    shown.line(f"relaunch: the weights are in {place / carried['folder']}")


def _kernels(folder: Path, document: Mapping[str, Any], cache_dir: Path, shown: Reports) -> None:
    carried = document["kernels"]
    if not carried:
        return
    if reason := carry.obstacle(carried, cache_dir):
        shown.line(f"relaunch: the compiled kernels are not used: {reason}; the first start compiles anew")
        return
    carry.read(carried, folder / make.KERNEL_ARCHIVE, cache_dir)
    shown.line(f"relaunch: the compiled kernels are in {cache_dir / 'jit' / carried['directory']}")


def serve(settings: Mapping[str, str], environ: Mapping[str, str], shown: Reports) -> None:
    """Become `relaunch serve` with ``settings`` and without a network. The user's own settings win."""
    env = {"RELAUNCH_OFFLINE": "on", **settings, **environ}
    words = " ".join(f"{name}={env[name]}" for name in ("RELAUNCH_OFFLINE", *settings))
    program = str(make.clone() / "relaunch")
    shown.line(f"relaunch: serving; later: {words} {program} serve")
    os.execve(program, [program, "serve"], env)
