"""The lines of a log file of any size: plain, compressed, in UTF-16, as one JSON string, or on standard input."""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import io
import lzma
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..engine.lines import LONGEST
from ..errors import unreadable

CHUNK = 1 << 20
HEAD = 4096  # bytes by which the form of a file is known
KEPT_OF_LONG = 4 * LONGEST  # characters of a line without an end: its begin and its end
_GZIP, _XZ, _BZIP2, _ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"BZh", b"\x28\xb5\x2f\xfd"
_BYTE_ORDER_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """The bytes of ``path`` (``-``: standard input), decompressed. Raises OSError, and Stop (66) for zstd where no
    library for it is installed."""
    file = io.FileIO(sys.stdin.fileno(), closefd=False) if str(path) == "-" else io.FileIO(path)
    with io.BufferedReader(file) as raw:
        yield _decompressed(raw, path)


def _decompressed(raw: io.BufferedReader[Any], path: str | Path) -> BinaryIO:
    head = raw.peek(HEAD)[:HEAD]
    if head.startswith(_GZIP):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if head.startswith(_XZ):
        return cast(BinaryIO, lzma.LZMAFile(raw))
    if head.startswith(_BZIP2):
        return cast(BinaryIO, bz2.BZ2File(raw))
    if head.startswith(_ZSTD):
        try:
            zstandard = importlib.import_module("zstandard")  # comes with the engine
        except ImportError:
            raise unreadable(f"{path} is compressed with zstd", f"unpack it first: zstd -d {path}") from None
        return cast(BinaryIO, zstandard.ZstdDecompressor().stream_reader(raw))
    return raw


def lines_of(file: BinaryIO) -> Iterator[str]:
    """The lines of ``file``, without their ends; bytes that fit no encoding are replaced. Of a line longer than
    ``KEPT_OF_LONG`` its begin and its end are kept."""
    chunk = file.read(CHUNK)
    decode = codecs.getincrementaldecoder(_encoding(chunk))("replace").decode
    text, rest = decode(chunk), ""
    # A whole log as one JSON string, or as one JSON object: its line ends are written as two characters.
    head = text[:KEPT_OF_LONG].lstrip()
    escaped = head[:1] == '"' or (head[:1] == "{" and "\n" not in text[:LONGEST] and "\\n" in head)
    while chunk:
        if escaped:
            text = _unescaped(rest + text)
            rest = ""
        lines = (rest + text).split("\n")
        yield from lines[:-1]
        rest = lines[-1]
        if len(rest) > KEPT_OF_LONG:
            rest = rest[: KEPT_OF_LONG // 2] + rest[-KEPT_OF_LONG // 2 :]
        chunk = file.read(CHUNK)
        text = decode(chunk)
    if rest:
        yield rest


def _unescaped(text: str) -> str:
    return text.replace("\\r", "").replace("\\n", "\n").replace("\\t", "\t").replace('\\"', '"')


def _encoding(head: bytes) -> str:
    for mark, encoding in _BYTE_ORDER_MARKS:
        if head.startswith(mark):
            return encoding
    sample = head[:HEAD]
    if len(sample) > 8 and sample[1::2].count(0) > 0.8 * len(sample) / 2:
        return "utf-16-le"
    if len(sample) > 8 and sample[0::2].count(0) > 0.8 * len(sample) / 2:
        return "utf-16-be"
    return "utf-8"
