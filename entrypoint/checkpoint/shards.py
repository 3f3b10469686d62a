"""Which safetensors files of a directory make up the checkpoint, and what their headers say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import Stop
from .safetensors import BadFile, TensorGroups, read_header

INDEX = "model.safetensors.index.json"
# Enough of an index to see how its shards are numbered.
INDEX_START_BYTES = 1 << 16
MOST_SHARDS = 100_000

_SHARD = re.compile(r':\s*"([^"/\\]+\.safetensors)"')


def read(directory: Path) -> TensorGroups | None:
    """Return the tensors of ``directory``, None when it holds no safetensors. Raises Stop: 65 when a header is
    broken, 66 when a shard that the index names is absent or cannot be read."""
    names = shard_names(directory)
    if not names:
        return None
    groups = TensorGroups()
    for name in names:
        path = directory / name
        try:
            groups.add_header(read_header(path)[0])
        except BadFile as error:
            raise broken(str(path), str(error)) from None
        except OSError as error:
            raise Stop("weights_missing", f"{path} cannot be read: {error.strerror}", "check its permissions") from None
    return groups


def broken(label: str, what: str) -> Stop:
    """Return the Stop (65) for a damaged file; ``what`` ends the sentence that ``label`` begins."""
    return Stop("weights_corrupt", f"{label} {what}", "fetch it again with `relaunch weights repair`")


def shard_names(directory: Path) -> list[str]:
    """Return the safetensors files of ``directory`` that make up the checkpoint (`select`)."""
    present = sorted(path.name for path in directory.glob("*.safetensors"))
    try:
        with (directory / INDEX).open("rb") as file:
            start = file.read(INDEX_START_BYTES).decode(errors="replace")
            # Numbered shards say how many there are: with all of them here the other 20 MB need no reading.
            named = _numbered(start)
            if named and set(named) <= set(present):
                return _with_mtp(named, present)
            return select(present, start + file.read().decode(errors="replace"), str(directory))
    except OSError:
        return select(present, None, str(directory))


def select(present: Sequence[str], index: str | None, label: str) -> list[str]:
    """Return the names among ``present`` that make up the checkpoint: those that the ``index`` (JSON text) names,
    else every safetensors file. ``label`` says where, for people. Raises Stop: 65 when the index names nothing, 66
    when one of its shards is not present."""
    found = sorted(name for name in present if name.endswith(".safetensors"))
    if index is None:
        return found
    # A regular expression: parsing the 240,700 lines of a big index takes ten times as long.
    named = sorted(set(_SHARD.findall(index)))
    if not named:
        raise broken(f"{label}/{INDEX}", "names no shard")
    missing = [name for name in named if name not in set(found)]
    if missing:
        raise Stop(
            "weights_missing",
            f"{len(missing)} of {len(named)} shards that {INDEX} names are absent from {label}, first {missing[0]}",
            "fetch them with `relaunch weights fetch`",
        )
    return _with_mtp(named, found)


def _with_mtp(named: list[str], present: list[str]) -> list[str]:
    """MTP weights often stand in a file of their own beside the index."""
    return named + [name for name in present if name not in set(named) and name.startswith("mtp")]


def _numbered(text: str) -> list[str]:
    """Every name of the series that the first name of an index belongs to."""
    match = re.search(r'"([^"/\\]*?)(\d+)-of-(\d+)\.safetensors"', text)
    if match is None or not 0 < int(match[3]) < MOST_SHARDS:
        return []
    prefix, width, total = match[1], len(match[2]), match[3]
    return [f"{prefix}{number:0{width}d}-of-{total}.safetensors" for number in range(1, int(total) + 1)]
