"""The safetensors format: a file's header, whether it fits the file, and its tensors in groups.

Format: 8 bytes little-endian header length n, n bytes of JSON {name: {dtype, shape, data_offsets}}, data. A file is
whole when the spans, sorted, follow each other from 0, each span has the bytes that dtype and shape ask for, and
8 + n + the last end is the file's size (https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import BinaryIO

# What the format's own reader refuses.
LARGEST_HEADER = 100_000_000

DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
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

_ENTRY = re.compile(rb'"([^"]+)":\s*\{"dtype":\s*"(\w+)",\s*"shape":\s*\[([\d, ]*)\],\s*"data_offsets":')
_EXPERT = re.compile(rb"\.experts\.\d+\.")
_EXPERT_NAME = re.compile(r"\.experts\.\d+\.")

Key = tuple[str, str, tuple[int, ...]]


class BadFile(ValueError):
    """What is wrong with a file, as the end of a sentence that begins with its name."""


def read_header(path: Path) -> tuple[bytes, int]:
    """Return the JSON header of one file and the bytes of its data. Raises BadFile, or OSError."""
    with path.open("rb") as file:
        return _header(file)


def _header(file: BinaryIO) -> tuple[bytes, int]:
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    if len(start) < 8:
        raise BadFile("is empty" if size == 0 else f"has only {size} bytes")
    length = int.from_bytes(start, "little")
    if length > LARGEST_HEADER or 8 + length > size or length < 2:
        raise BadFile(_not_safetensors(start + file.read(120), length, size))
    return file.read(length), size - 8 - length


def _not_safetensors(start: bytes, length: int, size: int) -> str:
    if start.startswith(b"version https://git-lfs"):
        return "is a git-lfs pointer, not the file (clone with git lfs)"
    if start.lstrip()[:1] == b"<":
        return "is a web page, not weights"
    if not start.strip(b"\0"):
        return "begins with zeros"
    return f"is truncated or not safetensors: its header claims {length} bytes, the file has {size}"


def check_file(path: Path) -> set[str]:
    """Return the names of the tensors of a whole file. Raises BadFile, or OSError."""
    text, data_bytes = read_header(path)
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise BadFile("has a header that is not an object")
        header.pop("__metadata__", None)
        end = 0
        for (begin, finish), name in sorted((row["data_offsets"], name) for name, row in header.items()):
            row = header[name]
            if begin != end:
                raise BadFile(f"has a gap or an overlap before tensor {name}")
            bits = DTYPE_BITS.get(row["dtype"])
            if finish < begin or (bits is not None and (finish - begin) * 8 != bits * math.prod(row["shape"])):
                raise BadFile(f"has tensor {name} whose bytes do not fit its dtype and shape")
            end = finish
    except BadFile:
        raise
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadFile("has a header that cannot be read") from None
    if end != data_bytes:
        short = end - data_bytes
        raise BadFile(f"is truncated: {short} bytes are missing" if short > 0 else f"is {-short} bytes too long")
    return set(header)


class TensorGroups:
    """Counts tensors by name pattern, dtype and shape. A checkpoint of 240,700 tensors is one group per layer and
    name, so no list of all tensors is ever kept."""

    def __init__(self) -> None:
        self.counts: dict[Key, list[int]] = {}  # -> [tensors, bytes of one]

    def add_header(self, header: bytes) -> None:
        """Count the tensors of one header (JSON text). Raises BadFile."""
        if not self._scan(header):
            self._parse(header)

    def add(self, name: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
        """Count one tensor of ``size`` bytes. Raises BadFile when dtype and shape ask for other bytes."""
        bits = DTYPE_BITS.get(dtype)
        if size < 0 or (bits is not None and (math.prod(shape) * bits + 7) // 8 != size):
            raise BadFile(f"has tensor {name} whose bytes do not fit its dtype and shape")
        self.counts.setdefault((_EXPERT_NAME.sub(".experts.*.", name), dtype, shape), [0, size])[0] += 1

    def _scan(self, header: bytes) -> bool:
        """The form that every writer uses, five times as fast as JSON; False when it is any other."""
        text = header.strip()
        entries = Counter(_ENTRY.findall(_EXPERT.sub(b".experts.*.", text)))
        found_keys = {text.count(key) for key in (b'"dtype"', b'"shape"', b'"data_offsets"')}
        if not (text[:1] == b"{" and text[-1:] == b"}") or found_keys != {sum(entries.values())}:
            return False
        for (raw, dtype, dimensions), count in entries.items():
            shape = tuple(int(x) for x in dimensions.split(b",") if x.strip())
            bits = DTYPE_BITS.get(dtype.decode())
            if bits is None or b"\\" in raw:
                return False
            key = (raw.decode(errors="replace"), dtype.decode(), shape)
            found = self.counts.setdefault(key, [0, (math.prod(shape) * bits + 7) // 8])
            found[0] += count
        return True

    def _parse(self, header: bytes) -> None:
        try:
            for name, entry in json.loads(header).items():
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                if not isinstance(entry["shape"], list):
                    raise TypeError("shape")
                self.add(name, str(entry["dtype"]), tuple(int(x) for x in entry["shape"]), end - begin)
        except BadFile:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            raise BadFile("has a header that cannot be read") from None
