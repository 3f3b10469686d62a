"""Tensors from safetensors headers: names, dtypes, shapes and bytes, without reading a weight.

A checkpoint of 240,700 tensors is one group per layer and name, so no list of all tensors is ever kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from math import prod
from pathlib import Path

from .errors import Stop

# What safetensors' own reader refuses.
LARGEST_HEADER = 100_000_000
_SHARD = re.compile(rb'"([^"/\\]+\.safetensors)"')
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
         "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64,
         "F64": 64, "C64": 64}  # fmt: skip

Key = tuple[str, str, tuple[int, ...]]


class Groups:
    """Counts tensors by name pattern, dtype and shape."""

    def __init__(self) -> None:
        self.counts: dict[Key, list[int]] = {}

    def add(self, header: bytes, label: str) -> None:
        """One shard's header (JSON text). Raises Stop (65) in one line when it is broken."""
        try:
            tensors = json.loads(header)
            for name, entry in tensors.items():
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                start = name.find(".experts.")
                if start >= 0:
                    stop = name.find(".", start + 9)
                    if stop > 0 and name[start + 9 : stop].isdecimal():
                        name = name[: start + 9] + "*" + name[stop:]
                key = (name, entry["dtype"], tuple(entry["shape"]))
                found = self.counts.get(key)
                if found is None:
                    self._check(label, name, entry["dtype"], key[2], end - begin)
                    self.counts[key] = [1, end - begin]
                else:
                    found[0] += 1
        except (ValueError, TypeError, KeyError, AttributeError, UnicodeDecodeError):
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
        text = index.read_bytes()
    except OSError:
        return present
    named = sorted({name.decode(errors="replace") for name in set(_SHARD.findall(text))})
    if not named:
        raise Stop("weights_corrupt", f"{index} names no shard", "fetch it again with `relaunch weights repair`")
    missing = [name for name in named if name not in set(present)]
    if missing:
        raise Stop(
            "weights_missing",
            f"{len(missing)} of {len(named)} shards that {index.name} names are absent from {directory}, first {missing[0]}",
            "fetch them with `relaunch weights fetch`",
        )
    # MTP weights often stand in a file of their own beside the index.
    return named + [name for name in present if name not in set(named) and name.startswith("mtp")]


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
