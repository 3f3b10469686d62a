"""Reads a log from a file or from standard input, whatever its container and encoding.

gzip, bzip2, xz and zstd are unpacked, UTF-16 and UTF-8 are decoded, a log that was stored as one JSON string is
unescaped, lines that a terminal wrapped are joined again. What is no text is refused: an unreadable file must never
look like a healthy one.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, cast

from ..engine.lines import LONGEST
from ..errors import unreadable

_CHUNK = 1 << 20  # bytes that are read at once
_SAMPLE = 1 << 16  # bytes of the beginning that decide about encoding and form
_BINARY_SHARE = 0.05  # of control bytes in the sample; logs have colours, nothing like this
_WRAP_WIDTHS = (80, 100, 120, 132)  # usual widths of terminals
_WRAP_SHARE = 0.25  # of lines that have exactly the width: then the text was wrapped there
_ZERO_SHARE = 0.3  # of NUL bytes, in a program or a tensor file
_INVALID_SHARE = 0.2  # of characters that are not UTF-8; a Latin-1 log has fewer
_CONTROL = bytes(set(range(1, 32)) - set(b"\t\n\r\x0b\x0c\x1b\x07\x08")) + b"\x7f"
_REFUSE_NEXT = "give a text log: plain, gzip, bzip2, xz or zstd; UTF-8 or UTF-16"


def read_lines(path: str | Path) -> Iterator[str]:
    """Yield the lines of the log at ``path`` (``-``: standard input) without their ends.

    Of a line longer than twice ``engine.lines.LONGEST`` characters the middle is left out. A line that was wrapped is
    yielded whole where it began, followed by empty ones, so that line numbers stay those of the file. Raises Stop
    (66) when the log cannot be read, is empty, or is no text.
    """
    try:
        if str(path) == "-":
            yield from _lines(_Peekable(sys.stdin.buffer), "standard input")
        else:
            with Path(path).open("rb") as file:
                yield from _lines(_Peekable(file), str(path))
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise unreadable(f"cannot read {path}: {reason}", _REFUSE_NEXT) from None


class _Peekable:
    """A binary stream whose first bytes can be looked at before it is read; standard input cannot seek."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        head = _read_full(stream, _SAMPLE)
        while head and not head.strip(b"\0"):  # a log that was cut while its writer went on starts with a hole
            head = _read_full(stream, _SAMPLE)
        self.head = head.lstrip(b"\0") if head.startswith(b"\0\0\0") else head
        self._rest = self.head

    def read(self, size: int = -1) -> bytes:
        """At most ``size`` bytes, the first ones again."""
        if self._rest:
            taken = self._rest if size < 0 else self._rest[:size]
            self._rest = self._rest[len(taken) :]
            return taken
        return self._stream.read(size)

    def readable(self) -> bool:
        """True, as io.BufferedReader asks."""
        return True


def _read_full(stream: IO[bytes], size: int) -> bytes:
    parts, length = [], 0
    while length < size and (part := stream.read(size - length)):
        parts.append(part)
        length += len(part)
    return b"".join(parts)


def _lines(raw: _Peekable, name: str) -> Iterator[str]:
    source = _Peekable(unpacked) if (unpacked := _unpacked(raw, name)) is not None else raw
    sample = source.head
    if not sample.strip():
        raise unreadable(f"{name} is empty", "give the log of the run that failed")
    encoding = _encoding(sample, name)
    lines = _split(source, encoding, _is_json_string(sample, encoding))
    width = _wrapped_at(sample.decode(encoding, "replace"))
    yield from _joined(lines, width) if width else lines


def _unpacked(raw: _Peekable, name: str) -> IO[bytes] | None:
    """The stream inside a compressed one, by its magic number; None for one that is not compressed."""
    stream = cast("BinaryIO", raw)
    if raw.head.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=stream))
    if raw.head.startswith(b"\xfd7zXZ\x00"):
        return cast("IO[bytes]", lzma.LZMAFile(stream))
    if raw.head.startswith(b"BZh"):
        return cast("IO[bytes]", bz2.BZ2File(stream))
    if raw.head.startswith(b"\x28\xb5\x2f\xfd"):
        try:
            import zstandard
        except ImportError:
            raise unreadable(f"{name} is compressed with zstd, which is not installed", "unpack it: zstd -d") from None
        return cast("IO[bytes]", zstandard.ZstdDecompressor().stream_reader(stream))
    return None


def _encoding(sample: bytes, name: str) -> str:
    """The name of the codec. Raises Stop (66) for what is no text."""
    if sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if sample.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    even, odd = sample[0::2].count(0), sample[1::2].count(0)
    half = max(len(sample) // 2, 1)
    if odd > 0.6 * half and even < 0.1 * half:
        return "utf-16-le"
    if even > 0.6 * half and odd < 0.1 * half:
        return "utf-16-be"
    control = len(sample) - len(sample.translate(None, _CONTROL))
    text = sample.decode("utf-8", "replace")
    if (
        sample.count(0) > _ZERO_SHARE * len(sample)
        or control > _BINARY_SHARE * len(sample)
        or text.count("\ufffd") > _INVALID_SHARE * len(text)
    ):
        raise unreadable(f"{name} is no text", _REFUSE_NEXT)
    return "utf-8"


def _is_json_string(sample: bytes, encoding: str) -> bool:
    r"""Whether the whole log is one JSON string whose line ends are written as ``\n``."""
    text = sample.decode(encoding, "replace").lstrip()
    return text.startswith('"') and r"\n" in text and text.count("\n") <= 1


def _split(source: _Peekable, encoding: str, escaped: bool) -> Iterator[str]:
    """The lines of a decoded stream; long ones in two pieces, so that memory stays bounded."""
    decode = codecs.getincrementaldecoder(encoding)("replace").decode
    rest, tail, first = "", "", escaped
    while True:
        chunk = source.read(_CHUNK)
        text = decode(chunk, not chunk)
        if first:
            text, first = text.lstrip().removeprefix('"'), False
        if escaped:
            text = text.replace(r"\n", "\n").replace(r"\t", "\t").replace(r"\"", '"')
        lines = text.split("\n")
        for line in lines[:-1]:
            yield _shortened(rest + tail + line)
            rest, tail = "", ""
        if len(rest) < LONGEST:
            room = LONGEST - len(rest)
            rest, tail = rest + lines[-1][:room], lines[-1][room:][-LONGEST:]
        else:
            tail = (tail + lines[-1])[-LONGEST:]
        if not chunk:
            break
    if rest or tail:
        yield _shortened(rest + tail)


def _shortened(line: str) -> str:
    """``line`` without its middle where it is too long, and without the carriage return of its end."""
    return (line if len(line) <= 2 * LONGEST else line[:LONGEST] + line[-LONGEST:]).rstrip("\r")


def _wrapped_at(sample: str) -> int | None:
    """The width at which a terminal wrapped the text, None when it did not."""
    lengths = [len(line.rstrip("\r")) for line in sample.split("\n")[:-1] or [sample]]
    longest = max(lengths)
    if longest not in _WRAP_WIDTHS or len(lengths) < 3:
        return None
    return longest if lengths.count(longest) >= _WRAP_SHARE * len(lengths) else None


def _joined(lines: Iterator[str], width: int) -> Iterator[str]:
    """Lines of exactly ``width`` characters together with what follows them."""
    held, merged = "", 0
    for line in lines:
        held += line
        if len(line) == width and len(held) <= LONGEST:
            merged += 1
            continue
        yield held
        yield from [""] * merged
        held, merged = "", 0
    if held:
        yield held
