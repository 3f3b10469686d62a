"""Tensors from safetensors headers: names, dtypes, shapes and bytes, without reading a weight.

A checkpoint of 240,700 tensors is one group per layer and name, so no list of all tensors is ever kept.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path

from ..errors import Stop

# What safetensors' own reader refuses.
LARGEST_HEADER = 100_000_000
_SHARD = re.compile(rb':\s*"([^"/\\]+\.safetensors)"')
_ENTRY = re.compile(rb'"([^"]+)":\s*\{"dtype":\s*"(\w+)",\s*"shape":\s*\[([\d, ]*)\],\s*"data_offsets":')
_EXPERT = re.compile(rb"\.experts\.\d+\.")
_EXPERT_NAME = re.compile(r"\.experts\.\d+\.")
_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}

Key = tuple[str, str, tuple[int, ...]]


class Groups:
    """Counts tensors by name pattern, dtype and shape."""

    def __init__(self) -> None:
        self.counts: dict[Key, list[int]] = {}

    def add(self, header: bytes, label: str) -> None:
        """One shard's header (JSON text). Raises Stop (65) in one line when it is broken."""
        if not self._scan(header, label):
            self._parse(header, label)

    def _scan(self, header: bytes, label: str) -> bool:
        """The form that every writer uses, five times as fast as JSON; False when it is any other."""
        text = header.strip()
        entries = Counter(_ENTRY.findall(_EXPERT.sub(b".experts.*.", text)))
        found_keys = {text.count(key) for key in (b'"dtype"', b'"shape"', b'"data_offsets"')}
        if not (text[:1] == b"{" and text[-1:] == b"}") or found_keys != {sum(entries.values())}:
            return False
        for (raw, dtype, dimensions), count in entries.items():
            shape = tuple(int(x) for x in dimensions.split(b",") if x.strip())
            bits = _BITS.get(dtype.decode())
            if bits is None or b"\\" in raw:
                return False
            key = (raw.decode(errors="replace"), dtype.decode(), shape)
            found = self.counts.setdefault(key, [0, (prod(shape) * bits + 7) // 8])
            found[0] += count
        return True

    def _parse(self, header: bytes, label: str) -> None:
        try:
            for name, entry in json.loads(header).items():
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                if not isinstance(entry["shape"], list):
                    raise TypeError("shape")
                name = _EXPERT_NAME.sub(".experts.*.", name)
                key = (name, str(entry["dtype"]), tuple(int(x) for x in entry["shape"]))
                self._check(label, name, key[1], key[2], end - begin)
                self.counts.setdefault(key, [0, end - begin])[0] += 1
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            raise broken(label, "its header is not a safetensors header") from None

    @staticmethod
    def _check(label: str, name: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
        bits = _BITS.get(dtype)
        if size < 0 or (bits is not None and (prod(shape) * bits + 7) // 8 != size):
            raise broken(label, f"{name} has {size} bytes, not those of {dtype} {list(shape)}")


def broken(label: str, what: str) -> Stop:
    return Stop("weights_corrupt", f"{label}: {what}", "fetch it again with `relaunch weights repair`")


def shard_names(directory: Path) -> list[str]:
    """The shards that the index names, else the safetensors files that are there. Raises Stop (66) when a named
    shard is absent."""
    index = directory / "model.safetensors.index.json"
    present = sorted(path.name for path in directory.glob("*.safetensors"))
    try:
        with index.open("rb") as file:
            text = file.read(1 << 16)
            # Numbered shards say how many there are: with all of them here the other 20 MB need no reading.
            named = _numbered(text)
            if not named or not set(named) <= set(present):
                text += file.read()
                named = sorted({name.decode(errors="replace") for name in set(_SHARD.findall(text))})
    except OSError:
        return present
    if not named:
        raise Stop("weights_corrupt", f"{index} names no shard", "fetch it again with `relaunch weights repair`")
    missing = [name for name in named if name not in set(present)]
    if missing:
        raise Stop(
            "weights_missing",
            f"{len(missing)} of {len(named)} shards that {index.name} names are absent from {directory}, first "
            f"{missing[0]}",
            "fetch them with `relaunch weights fetch`",
        )
    # MTP weights often stand in a file of their own beside the index.
    return named + [name for name in present if name not in set(named) and name.startswith("mtp")]


def _numbered(text: bytes) -> list[str]:
    """Every name of the series that the first name of an index belongs to."""
    match = re.search(rb'"([^"/\\]*?)(\d+)-of-(\d+)\.safetensors"', text)
    if match is None or not 0 < int(match[3]) < 100_000:
        return []
    prefix, width, total = match[1].decode(errors="replace"), len(match[2]), match[3].decode()
    return [f"{prefix}{number:0{width}d}-of-{total}.safetensors" for number in range(1, int(total) + 1)]


def read_header(path: Path) -> bytes:
    """The JSON header of one shard. Raises Stop (65) when it is cut short or impossible."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= LARGEST_HEADER:
                raise broken(str(path), f"a header of {length} bytes is impossible")
            header = file.read(length)
    except OSError as error:
        raise Stop("weights_missing", f"{path} cannot be read: {error.strerror}", "check its permissions") from None
    if len(header) != length:
        raise broken(str(path), f"it ends after {8 + len(header)} bytes, inside its header")
    return header


def read_all(directory: Path, names: Iterable[str]) -> Groups:
    groups = Groups()
    for name in names:
        groups.add(read_header(directory / name), str(directory / name))
    return groups
