"""Small JSON files that survive a power cut and that nobody can turn against their reader.

One rule for all of them: written beside and renamed, synced with their folder, mode 0600; read only when they are
regular files of a bounded size (a FIFO, a link or a document without end is treated as damage); a folder keeps its
newest files.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

SCHEMA = 1
# A post-mortem of eight ranks has under 1 MB, the record of a checkpoint with 3,000 files under 1 MB.
MAX_BYTES = 32 << 20
# A temporary file older than this, in seconds, was left behind by a kill.
TEMPORARY_SECONDS = 3600.0
_PREFIX = ".tmp-"


def open_regular(path: Path | str, flags: int) -> int:
    """Open a file of our own and return its descriptor; a new one has mode 0600. Never waits and follows no link.
    Raises OSError, also for what is no regular file."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the text, with damaged UTF-8 replaced. Raises OSError, also for a file larger than ``max_bytes``."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(f"{path} has more than {max_bytes} bytes")
    return data.decode("utf-8", "replace")


def parse(text: str) -> Any:
    """Return the JSON value. Raises ValueError for anything that could not be written as JSON again: NaN, infinities
    and lone surrogates as well as broken text."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # 1e999 is infinite without being a constant
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def plain(value: Any) -> Any:
    """Return ``value`` as any JSON reader takes it: a number that is not finite is None, a lone surrogate is "?"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the document, or None when it is absent, damaged or of another schema: state is a help, never a must."""
    try:
        document = parse(read_text(path))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and document.get("schema") == SCHEMA else None


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` with `"schema": 1`. Raises OSError."""
    text = json.dumps(plain({"schema": SCHEMA, **document}), indent=1, allow_nan=False)
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """Write the file, whole or not at all, so that it survives a power cut. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=_PREFIX, dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def keep_newest(folder: Path, count: int) -> None:
    """Remove all but the ``count`` newest JSON files, and temporary files that a kill left behind."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                found.append((path.lstat().st_mtime, path.name, path))
    found.sort()
    newest = found[-1][0] if found else 0.0
    left = [path for at, name, path in found if name.startswith(_PREFIX) and at < newest - TEMPORARY_SECONDS]
    documents = [path for _, name, path in found if name.endswith(".json")]
    for path in (*left, *documents[: max(0, len(documents) - count)]):
        with contextlib.suppress(OSError):
            path.unlink()
