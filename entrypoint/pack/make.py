"""`relaunch pack`: gather, size, write."""

from __future__ import annotations

import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from .. import __version__, json_store
from ..config import loading
from ..config.settings import Loaded
from ..errors import config_rejected, from_os_error, unreadable
from ..kernels import carry
from ..units import format_bytes
from . import contents, download, image, weights, wheels
from .contents import DOCUMENT, Item, Reports

ROOT = Path(__file__).resolve().parents[2]
# What the other side needs of a clone: nothing that a user may have put beside it, such as relaunch.env.
SOURCES = (
    *("relaunch", "pyproject.toml", "entrypoint", "env", "locks", "scripts", "deploy", "docs"),
    *("compose.yaml", "README.md", "SECURITY.md"),
)
SOURCE_ARCHIVE = "relaunch.tar"
KERNEL_ARCHIVE = "kernels.tar"
# Settings that say what is served. All others are of the machine, or secret.
CARRIED = ("RELAUNCH_PRESET", "RELAUNCH_MODEL", "RELAUNCH_REVISION")


@dataclass(frozen=True)
class Request:
    """What is to be packed. ``image``: name of a container image; ``check``: only say how much it is."""

    out: Path
    image: str | None = None
    weights: bool = False
    check: bool = False


def pack(request: Request, environ: Mapping[str, str], shown: Reports) -> dict[str, Any]:
    """Make ``request.out`` a whole pack, or go on with what an earlier run left there; return the document that lies in
    it as `pack.json`, with ``bytes`` (all of it) and ``bytes_written``. Raises Stop: 73 before anything is written when
    the disk is too small, 66 when the weights are not here and good, 69 when the index does not answer, 78 outside a
    clone."""
    root = clone()
    loaded = loading.load(environ)
    out = request.out.absolute()
    if out.is_relative_to(root) or root.is_relative_to(out):
        raise config_rejected(f"--out {out} and the clone {root} lie in each other", "name a directory elsewhere")
    stored = image.find(request.image) if request.image else None
    model = weights.read(loaded, environ) if request.weights else weights.Model("none")
    with httpx.Client(timeout=download.TIMEOUT) as client, tempfile.TemporaryDirectory(prefix="relaunch-pack-") as work:
        shown.line("relaunch: asking the package index for the wheels of the locks")
        found = wheels.of_clone(root, Path(work))
        cache_dir = loaded.settings.cache_dir
        compiled = carry.describe(cache_dir)
        groups: dict[str, list[Item]] = {
            "wheels": [download.item(wheel, client) for wheel in found],
            "relaunch": [Item(SOURCE_ARCHIVE, None, lambda partial, _: _archive(root, partial))],
            "kernels": [Item(KERNEL_ARCHIVE, None, lambda partial, _: carry.write(cache_dir, partial))]
            if compiled
            else [],
            "weights": list(model.items),
            "image": [stored.item()] if stored else [],
        }
        document = {
            "version": __version__,
            "python": "{}.{}".format(*sys.version_info[:2]),
            "root": str(root),
            "locks": locks(root),
            "settings": _settings(loaded, model),
            "kernels": compiled,
            "weights": model.document(),
            "image": {"name": stored.name, "file": stored.file} if stored else None,
        }
        return _fill(out, request.check, groups, stored.size if stored else 0, document, shown)


def clone() -> Path:
    """Return the clone that this package lies in. Raises Stop (78) in an image, a Nix closure or an environment."""
    if not (ROOT / "relaunch").is_file() or not (ROOT / "locks/engine.txt").is_file():
        raise config_rejected("packs are made and opened by a clone of the repository", "run ./relaunch there")
    return ROOT


def locks(root: Path) -> dict[str, str]:
    """Return the SHA-256 of each lock of a clone, by file name."""
    names = ("runtime.txt", "engine.txt", "gateway.txt", "dev.txt")
    return {name: contents.digest(root / "locks", name) for name in names}


def _settings(loaded: Loaded, model: weights.Model) -> dict[str, str]:
    found = {
        name: str(value)
        for name in CARRIED
        if (value := getattr(loaded.settings, name.removeprefix("RELAUNCH_").lower()))
        and loaded.sources[name.removeprefix("RELAUNCH_").lower()] == "environment"
    }
    if model.kind == "hub":
        found["RELAUNCH_REVISION"] = str(model.revision)
    return found


def _fill(
    out: Path,
    check: bool,
    groups: Mapping[str, list[Item]],
    image_bytes: int,
    document: dict[str, Any],
    shown: Reports,
) -> dict[str, Any]:
    known = contents.sums(out)
    items = [item for group in groups.values() for item in group]
    left = contents.missing(out, items, known)
    need = contents.bytes_left(out, left) + (image_bytes if any(item in left for item in groups["image"]) else 0)
    for name, group in groups.items():
        size = image_bytes if name == "image" else sum(item.size or 0 for item in group)
        if group:
            count = f"{len(group)} file{'s'[: len(group) - 1]}"
            shown.line(f"relaunch: {name}: {count}" + (f", {format_bytes(size)}" if size else ""))
    if not document["kernels"]:
        shown.line(
            "relaunch: kernels: none are compiled here; `relaunch warm` before packing spares the other side that"
        )
    shown.line(f"relaunch: {format_bytes(need)} to write to {out}")
    contents.need_space({out: need}, "--out")
    if check:
        return document | {"bytes_written": 0, "bytes_left": need}
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / DOCUMENT).unlink(missing_ok=True)  # not whole while it is being written
        written = contents.write(out, left, "--out", shown)
        script = _script(document)
        (out / "unpack").write_text(script)
        (out / "unpack").chmod(0o755)
        json_store.write_json(out / DOCUMENT, document)
        (out / DOCUMENT).chmod(0o644)
        wanted = {item.path for item in items}
        digests = {path: digest for path, digest in (known | written).items() if path in wanted}
        for path in ("unpack", DOCUMENT):
            digests[path] = contents.digest(out, path)
        _remove_others(out, set(digests))
        contents.write_sums(out, digests)
    except OSError as error:
        raise from_os_error(error, Path(error.filename or out), "--out") from None
    total = sum((out / path).stat().st_size for path in digests)
    return document | {"bytes": total, "bytes_written": sum((out / path).stat().st_size for path in written)}


def _remove_others(out: Path, wanted: set[str]) -> None:
    """Remove what an earlier pack in this directory had and this one has not; nothing that a pack cannot have."""
    ours = [*out.glob("wheels/*.whl*"), *out.glob("image-*.tar*"), out / KERNEL_ARCHIVE]
    ours += [path for path in (out / weights.FOLDER).rglob("*") if not path.is_dir()]
    for path in ours:
        if str(path.relative_to(out)) not in wanted:
            path.unlink(missing_ok=True)


def _archive(root: Path, target: Path) -> None:
    """The clone's own files, without byte code, owners and what a user may have put there."""

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if "__pycache__" in member.name:
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(target, "w") as archive:
        for name in SOURCES:
            if (root / name).exists():
                archive.add(root / name, name, filter=kept)


def _script(document: Mapping[str, Any]) -> str:
    """The command of the other side, for a machine that has nothing of relaunch yet."""
    text = (ROOT / "scripts/unpack").read_text()
    minor = str(document["python"]).rpartition(".")[2]
    return text.replace("@MINOR@", minor).replace("@ROOT@", str(document["root"]))


def show(document: Mapping[str, Any], out: Path) -> str:
    """Return the last words of a pack: what to carry, what to run, and the digest to compare there."""
    if "bytes" not in document:
        return f"nothing was written; {format_bytes(document['bytes_left'])} are missing in {out}"
    digest = contents.digest(out, contents.SUMS)
    return (
        f"{out}: {format_bytes(document['bytes'])}, {format_bytes(document['bytes_written'])} of it written now.\n"
        f"There: sh {out.name}/unpack. It proves every file against {contents.SUMS}, whose own SHA-256 is\n{digest}"
    )


def read(folder: Path) -> dict[str, Any]:
    """Return the document of a pack. Raises Stop (66) for a directory that is none, or not a whole one."""
    document = json_store.read_json(folder / DOCUMENT)
    if document is None:
        raise unreadable(
            f"{folder} is no pack, or not a whole one: {DOCUMENT} is written last",
            "run the same `relaunch pack` once more: it goes on where it ended",
        )
    return document
