"""What the installer says while it works: sizes, time left, and errors; not a line a package."""

from __future__ import annotations

import fcntl
import importlib.util
import io
import os
from pathlib import Path
from types import ModuleType

import pytest
from docker_engine import ROOT

from entrypoint.ui.wait import installation


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "scripts/install.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


INSTALL = load()
# uv 0.13.9, standard error without a terminal.
SAID = """\
Using CPython 3.11.2 interpreter at: .venv/bin/python
Resolved 184 packages in 54ms
Downloading numpy (16.1MiB)
Downloading triton (272.5MiB)
 Downloaded numpy
 Downloaded triton
Prepared 4 packages in 2.21s
Installed 4 packages in 80ms
 + numpy==2.4.6
 + triton==3.9.0
"""


def test_packages_are_counted_and_not_listed() -> None:
    download = INSTALL.Download()
    passed = [text for line in SAID.splitlines(keepends=True) if (text := download.read(line)) is not None]
    assert passed == ["Resolved 184 packages in 54ms", "Prepared 4 packages in 2.21s", "Installed 4 packages in 80ms"]
    assert download.announced == {"numpy": int(16.1 * (1 << 20)), "triton": int(272.5 * (1 << 20))}


@pytest.mark.parametrize(
    "line", ["error: Failed to build `outlines-core==0.1.26`", "  cause: no space left", "hint: x"]
)
def test_errors_are_passed_on(line: str) -> None:
    assert INSTALL.Download().read(f"\x1b[31m{line}\x1b[0m\n") == line


def test_the_line_has_size_and_time_left() -> None:
    download = INSTALL.Download()
    assert download.text(10, 1.0) is None  # nothing is being downloaded yet
    download.read("Downloading torch (4000.0MiB)\n")
    total = 4000 * (1 << 20)
    half = download.text(int(total * INSTALL.UNPACKED / 2), download.began + 60)
    assert half == "downloading and unpacking: 2.1 of 4.2 GB, about 1m00s left"
    assert "4.2 of 4.2 GB" in download.text(total * 10, download.began + 60)


def test_bytes_written_by_a_process_are_read_from_the_kernel(tmp_path: Path) -> None:
    before = INSTALL._written(os.getpid())
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    assert INSTALL._written(os.getpid()) - before >= 1 << 20
    assert INSTALL._written(1 << 30) == 0


def test_wait_reads_what_an_installer_at_work_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "installing"
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert installation(status) is None
    speaker = INSTALL.Speaker(status)
    speaker.line("compiling a rather long list of files to byte code")
    speaker.line("linking")
    assert installation(status) == "linking"
    speaker.end()
    assert installation(status) is None and installation(None) is None


def test_a_reader_does_not_take_the_file_from_an_installer(tmp_path: Path) -> None:
    status = tmp_path / "installing"
    status.write_text("old words\n")
    with open(status) as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
    assert installation(status) is None


def test_byte_code_is_made_for_every_file_that_is_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        (tmp_path / f"m{number}.py").write_text("x = '\\d'\n")
    (tmp_path / "template.py").write_text("this is {{ no }} Python\n")
    monkeypatch.setattr(INSTALL.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr("sys.stderr", shown := io.StringIO())
    speaker = INSTALL.Speaker(tmp_path / "installing")
    INSTALL.compile_all(speaker)
    speaker.end()
    assert len(list((tmp_path / "__pycache__").iterdir())) == 20
    assert shown.getvalue() == "relaunch: compiling 21 files to byte code\n"
