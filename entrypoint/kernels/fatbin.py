"""Which GPUs a shared library carries code for, read from the headers of its CUDA fat binaries.

A translation unit leaves one container (magic, version, header size, payload size) of entries; each entry's header
names its kind (PTX or machine code), its size, its architecture (major times ten plus minor) and, in its flags,
whether it is for that architecture alone (the ``a`` of sm_120a). Payloads are not read.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MAGIC = 0xBA55ED50
# Not `__nv_relfatbin`: relocatable copies, already linked into this one.
_SECTION = b".nv_fatbin"
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, header size, payload size
_ENTRY = struct.Struct("<HHIQ12xI8xQ")  # kind, version, header size, payload size, architecture, flags
_KINDS: dict[int, Literal["ptx", "elf"]] = {1: "ptx", 2: "elf"}
_SPECIFIC = 0x100000


@dataclass(frozen=True, order=True)
class Image:
    """One compiled form of a translation unit. ``arch``: 120 for SM120; ``specific``: the ``a`` variant."""

    kind: Literal["ptx", "elf"]
    arch: int
    specific: bool = False

    def runs_on(self, sm: int) -> bool:
        """The driver's rule: machine code needs the same major version and no newer minor, PTX is compiled for
        anything newer, and an ``a`` variant runs on its own architecture only."""
        if self.specific:
            return self.arch == sm
        return self.arch <= sm and (self.kind == "ptx" or self.arch // 10 == sm // 10)


Unit = frozenset[Image]


def read(path: Path) -> list[Unit]:
    """The translation units in ``path``; empty when it is no 64-bit ELF file or has no GPU code. Raises OSError."""
    with path.open("rb") as file:
        if file.read(5) != b"\x7fELF\x02":
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return [unit for offset, size in _sections(data) for unit in _walk(data, offset, offset + size)]
            except struct.error:  # cut short
                return []


def _sections(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    if not table or not count:
        return
    rows = [struct.unpack_from("<I4x8x8xQQ", data, table + index * entry_size) for index in range(count)]
    names = rows[names_index][1]
    for name, offset, size in rows:
        start = names + name
        if data[start : data.find(b"\0", start)] == _SECTION:
            yield offset, size


def _walk(data: mmap.mmap, position: int, end: int) -> Iterator[Unit]:
    start = position
    while position + _CONTAINER.size <= end:
        magic, _, header, payload = _CONTAINER.unpack_from(data, position)
        if magic != MAGIC:
            position += 8  # padding between containers
            continue
        entry, position = position + header, position + header + payload
        images = set()
        while entry + _ENTRY.size <= position:
            kind, _, header, size, arch, flags = _ENTRY.unpack_from(data, entry)
            if kind in _KINDS:
                images.add(Image(_KINDS[kind], arch, bool(flags & _SPECIFIC)))
            if header == 0:
                break
            entry += header + size
        position += (start - position) % 8
        yield frozenset(images)
