"""`explain`: every form in which a log reaches us, and those that are refused."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import sys
from pathlib import Path

import pytest

from entrypoint.errors import EXIT_UNREADABLE, Stop
from entrypoint.healing.explain import explain_file

DATA = Path(__file__).parents[1] / "data" / "logs"
OOM = """[2026-11-29 16:41:08 TP0] Load weight begin. avail mem=93.86 GB
[2026-11-29 16:41:09 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/sglang/srt/model_loader/loader.py", line 1, in load_model
    return model
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
[2026-11-29 16:41:10] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
"""


def lines(form: str) -> str:
    return "".join(form.format(line) + "\n" for line in OOM.splitlines())


FORMS = {
    "gzip": gzip.compress(OOM.encode()),
    "xz": lzma.compress(OOM.encode()),
    "bzip2": bz2.compress(OOM.encode()),
    "utf-8 with a mark": OOM.encode("utf-8-sig"),
    "utf-16 with a mark": OOM.encode("utf-16"),
    "utf-16 without": OOM.encode("utf-16-le"),
    "windows line ends": OOM.replace("\n", "\r\n").encode(),
    "journald short-iso": lines("2026-11-29T16:41:08+0000 box relaunch[77]: {}").encode(),
    "journald short": lines("Nov 29 16:41:08 box relaunch[77]: {}").encode(),
    "rfc 5424": lines("<14>1 2026-11-29T16:41:08.000Z box relaunch 77 - - {}").encode(),
    "compose": lines("sglang-1  | {}").encode(),
    "kubernetes": lines("2026-11-29T16:41:08.123456789Z stderr F {}").encode(),
    "docker json": "".join(
        json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-11-29T16:41:08Z"}) + "\n"
        for line in OOM.splitlines()
    ).encode(),
    "one json string": json.dumps(OOM).encode(),
    "one json object": json.dumps({"level": "error", "message": OOM}).encode(),
    "80 columns": "".join(
        line[at : at + 80] + "\n" for line in (OOM * 3).splitlines() for at in range(0, len(line), 80)
    ).encode(),
    "noise before it": b"\x00\xff\xfe" * 300_000 + b"\n" + OOM.encode(),
    "one long line": b"x" * (5 << 20) + b" torch.OutOfMemoryError: CUDA out of memory while loading the model weights",
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_log_in_every_form(form: str, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(FORMS[form])
    assert explain_file(log).cause == "oom_load"


def test_zstd_is_read_where_its_library_is_and_refused_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "engine.log.zst"
    log.write_bytes(b"\x28\xb5\x2f\xfd" + b"\x00" * 20)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(Stop) as stop:
        explain_file(log)
    assert (stop.value.exit_code, "zstd -d" in stop.value.next_step) == (EXIT_UNREADABLE, True)
    monkeypatch.undo()
    zstandard = pytest.importorskip("zstandard", reason="comes with the engine")
    log.write_bytes(zstandard.ZstdCompressor().compress(OOM.encode()))
    assert explain_file(log).cause == "oom_load"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n",
        bytes(range(256)) * 400,
        gzip.compress(OOM.encode())[:40],
        b"\x7fELF\x02\x01" + b"\x00\x01\x02" * 9000,
    ],
    ids=["empty", "blank", "every byte", "cut gzip", "program"],
)
def test_what_is_no_log_is_refused_and_not_called_healthy(content: bytes, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(content)
    with pytest.raises(Stop) as stop:
        explain_file(log)
    assert stop.value.exit_code == EXIT_UNREADABLE


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Stop) as stop:
        explain_file(tmp_path / "absent.log")
    assert stop.value.exit_code == EXIT_UNREADABLE


def test_a_dash_is_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(gzip.compress(OOM.encode()))
    with log.open("rb") as file:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))
        assert explain_file("-").cause == "oom_load"


def test_an_end_after_many_lines_is_found_where_it_stands(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    ready = "[2026-11-29 16:49:57] The server is fired up and ready to roll!\n"
    decode = "[2026-11-29 16:50:01 TP0] Decode batch, #running-req: 8, #token: 32024, token usage: 0.03\n"
    log.write_text(ready + decode * 40_000 + OOM.splitlines()[4] + "\n" + OOM.splitlines()[5])
    verdict = explain_file(log)
    assert (verdict.cause, verdict.evidence[0].line) == ("oom_runtime", 40_002)
