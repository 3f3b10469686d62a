"""The header of a safetensors file, and whether it fits the file.

Format: 8 bytes little-endian header length n, n bytes of JSON {name: {dtype, shape, data_offsets}}, data.
A file is whole when the spans, sorted, follow each other from 0, each span has the bytes that dtype and shape
ask for, and 8 + n + the last end is the file's size.
"""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

MAX_HEADER = 100_000_000  # the limit of the format's own reader

_BITS = {
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
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


class BadFile(ValueError):
    """What is wrong with the file, for people."""


def read(path: Path) -> set[str]:
    """The tensors' names. Raises BadFile, or OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        if len(start) < 8:
            raise BadFile("is empty" if size == 0 else f"has only {size} bytes")
        length = int(struct.unpack("<Q", start)[0])
        if length > MAX_HEADER or 8 + length > size or length < 2:
            raise BadFile(_not_weights(start + file.read(120), length, size))
        text = file.read(length)
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise BadFile("has a header that is not an object")
        header.pop("__metadata__", None)
        rows = sorted((row["data_offsets"], name) for name, row in header.items())
        end = 0
        for (begin, finish), name in rows:
            row = header[name]
            if begin != end:
                raise BadFile(f"has a gap or an overlap before tensor {name}")
            bits = _BITS.get(row["dtype"])
            if finish < begin or (bits is not None and (finish - begin) * 8 != bits * math.prod(row["shape"])):
                raise BadFile(f"has tensor {name} whose bytes do not fit its dtype and shape")
            end = finish
    except BadFile:
        raise
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadFile("has a header that cannot be read") from None
    if 8 + length + end != size:
        short = 8 + length + end - size
        raise BadFile(f"is truncated: {short} bytes are missing" if short > 0 else f"is {-short} bytes too long")
    return set(header)


def _not_weights(start: bytes, length: int, size: int) -> str:
    if start.startswith(b"version https://git-lfs"):
        return "is a git-lfs pointer, not the file (clone with git lfs)"
    if start.lstrip()[:1] == b"<":
        return "is a web page, not weights"
    if not start.strip(b"\0"):
        return "begins with zeros"
    return f"is truncated or not safetensors: its header claims {length} bytes, the file has {size}"
