"""The files of a verified model, as they lie in the hub's cache or in a directory, and the links between them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.settings import Loaded
from ..errors import unreadable
from ..weights import cache, commands, hub, source
from .contents import Item, copied

FOLDER = "weights"


@dataclass(frozen=True)
class Model:
    """What of a model is packed. ``kind``: hub, directory, or none for weights that the packages bring or that are
    generated. ``folder``: its name under `weights/`. ``links``: target by path, both relative to there."""

    kind: str
    folder: str = ""
    revision: str | None = None
    items: tuple[Item, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any] | None:
        """What `pack.json` says about it; None when nothing is carried."""
        if self.kind == "none":
            return None
        return {"kind": self.kind, "folder": self.folder, "revision": self.revision, "links": dict(self.links)}


def read(loaded: Loaded, environ: Mapping[str, str]) -> Model:
    """Return the files of the model that the settings name, verified as `relaunch weights verify` does it. Raises Stop
    (65, 66) unless all of them are here and good: what is not proven is not packed."""
    found = source.parse(loaded.settings.model)
    if found.kind not in ("hub", "directory"):
        return Model("none")
    document, code = commands.run("verify", loaded, environ=environ)
    if code or document["path"] is None:
        raise unreadable(
            f"the weights of {document['model']} are not complete and good", "run `relaunch weights fetch` first"
        )
    root = Path(document["path"])
    if found.kind == "directory":
        files = (Path(place) / name for place, _, names in os.walk(root) for name in names)
        items = [copied(file, f"{FOLDER}/{root.name}/{file.relative_to(root)}") for file in sorted(files)]
        return Model("directory", root.name, None, tuple(items))
    storage = hub.read(loaded, environ).folder(document["model"])
    items, links = [], {}
    for path, blob, file in _snapshot(root):
        place = f"snapshots/{root.name}/{path}"
        if blob is not None:
            links[place] = "/".join([".."] * place.count("/") + ["blobs", blob])
            place = f"blobs/{blob}"
        items.append(copied(file, f"{FOLDER}/{storage.name}/{place}"))
    listing = storage / "trees" / f"{root.name}.json"
    for file in [*_refs(storage, root.name), *([listing] if listing.is_file() else [])]:
        items.append(copied(file, f"{FOLDER}/{storage.name}/{file.relative_to(storage)}"))
    # Two files of a model may be one blob.
    unique = {item.path: item for item in items}
    return Model("hub", storage.name, root.name, tuple(unique.values()), links)


def _snapshot(root: Path) -> Iterator[tuple[Path, str | None, Path]]:
    """(path in the snapshot, name of its blob if it is a link, file with the bytes) of each file."""
    for place, _, names in os.walk(root):
        for name in sorted(names):
            file = Path(place) / name
            yield file.relative_to(root), cache.blob_name(file), cache.link_target(file)


def _refs(storage: Path, commit: str) -> list[Path]:
    """The branches and tags that the cache knows to be this commit."""
    refs = sorted(path for path in (storage / "refs").rglob("*") if path.is_file())
    return [path for path in refs if path.read_text(errors="replace").strip() == commit]
