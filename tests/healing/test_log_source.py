"""Forms in which people hand logs over: each is read as the same lines, or refused with exit 66."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import sys
from pathlib import Path

import pytest

from entrypoint.errors import EXIT_UNREADABLE, Stop
from entrypoint.healing.explain import explain_file
from entrypoint.healing.log_source import read_lines

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
TEXT = f"[2026-11-29 16:41:08 TP0] Load weight begin. avail mem=93.86 GB\n\n{OOM}\n"


@pytest.mark.parametrize(
    "content",
    [
        TEXT.encode(),
        gzip.compress(TEXT.encode()),
        lzma.compress(TEXT.encode()),
        bz2.compress(TEXT.encode()),
        TEXT.encode("utf-16"),
        TEXT.encode("utf-16-le"),
        TEXT.encode("utf-16-be"),
        TEXT.encode("utf-8-sig"),
        gzip.compress(TEXT.encode("utf-16")),
        TEXT.replace("\n", "\r\n").encode(),
        json.dumps(TEXT).encode(),
        b"\0" * 300_000 + TEXT.encode(),
    ],
    ids=["plain", "gz", "xz", "bz2", "utf16", "utf16le", "utf16be", "bom", "gz-utf16", "crlf", "json", "hole"],
)
def test_the_same_log_in_any_form_has_the_same_lines(content: bytes, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(content)
    assert list(read_lines(log))[:3] == TEXT.split("\n")[:3]
    assert explain_file(log).cause == "oom_load"


def test_zstd_is_read_where_its_library_is_installed(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    log = tmp_path / "engine.log.zst"
    log.write_bytes(zstandard.ZstdCompressor().compress(TEXT.encode()))
    assert explain_file(log).cause == "oom_load"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"\n \n\n", "empty"),
        (b"\0" * 5000, "empty"),
        (os.urandom(200_000), "no text"),
        (Path(sys.executable).read_bytes()[:200_000], "no text"),
        (gzip.compress(TEXT.encode() * 100)[:60], "cannot read"),
        (gzip.compress(os.urandom(200_000)), "no text"),
    ],
    ids=["empty", "blank", "zeros", "random", "program", "cut-gz", "gz-of-binary"],
)
def test_what_is_no_log_is_refused_and_never_called_healthy(content: bytes, word: str, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(content)
    with pytest.raises(Stop, match=word) as stop:
        explain_file(log)
    assert stop.value.exit_code == EXIT_UNREADABLE


def test_a_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(TEXT.encode()))))
    assert explain_file("-").cause == "oom_load"


def test_lines_that_a_terminal_wrapped_are_joined_and_keep_their_numbers(tmp_path: Path) -> None:
    long = (
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.6. "
        "Raise --mem-fraction-static above 0.613 (minimum viable = 1 - available/pre = 0.6121)."
    )
    wrapped = [line[at : at + 80] for line in (long, "short", "x" * 200, "end") for at in range(0, len(line), 80)]
    log = tmp_path / "engine.log"
    log.write_text("\n".join(wrapped))
    lines = list(read_lines(log))
    assert lines[0] == long
    assert lines[len(wrapped) - 1] == "end"
    assert explain_file(log).cause == "kv_pool_too_small"


def test_an_error_at_the_end_of_one_huge_line_is_found(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(b"first\n" + b"x" * 20_000_000 + b" " + OOM.encode() + b"\nlast\n")
    verdict = explain_file(log)
    assert verdict.cause == "oom_runtime"
    assert [item.line for item in verdict.evidence] == [2]
