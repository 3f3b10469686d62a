"""Install one hashed lock into this environment and say, phase by phase, how far it is and how long it will take.

`./relaunch` runs it as ``.venv/bin/python scripts/install.py LOCK``. It needs uv and nothing that it installs. What
it says last also stands in `.venv/installing`, locked for as long as it works: `relaunch wait` reads it there.
"""

from __future__ import annotations

import compileall
import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

from entrypoint.ui.progress_line import ProgressLine
from entrypoint.units import format_duration

ROOT = Path(__file__).resolve().parents[1]
STATUS = Path(sys.prefix) / "installing"
# Bytes written to disk for each byte downloaded: 9.5 GB of 4.3 GB for the engine's lock.
UNPACKED = 2.2
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_DOWNLOADING = re.compile(r"Downloading (\S+) \(([\d.]+)([KMG]?i?B)\)")
# uv's own account of what it did, a line a package.
_DETAIL = re.compile(r"\s*([+~-] \S+==|Downloaded |Building |Built |Using |Audited |Checked |Uninstalled )")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Speaker:
    """Says what happens on standard error, and in a file for `relaunch wait`."""

    def __init__(self, status: Path) -> None:
        self._file = open(status, "w", encoding="utf-8")  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._shown = ProgressLine(sys.stderr)

    def line(self, text: str) -> None:
        """The beginning of a phase."""
        self._note(text)
        self._shown.line(f"relaunch: {text}")

    def progress(self, text: str) -> None:
        """Where the present phase stands."""
        self._note(text)
        self._shown.progress(f"relaunch: {text}")

    def passed_on(self, text: str) -> None:
        """A line of uv."""
        self._shown.line(f"uv: {text}")

    def end(self) -> None:
        """Let go of the terminal's line and of the file."""
        self._shown.end()
        self._file.close()

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a help for others, no more
            os.pwrite(self._file.fileno(), f"{text:<160}\n".encode(), 0)


class Download:
    """What uv says about its downloads, and how much of it is unpacked.

    ``announced``: bytes to download, by package; uv names every package of 1 MiB and more as it starts on it, which for
    up to fifty of them is at once.
    """

    def __init__(self) -> None:
        self.announced: dict[str, int] = {}
        self.began = time.monotonic()

    def read(self, line: str) -> str | None:
        """Take in a line of uv. Returns what is to be passed on: errors, hints, warnings and totals."""
        text = _ANSI.sub("", line.rstrip())
        if found := _DOWNLOADING.match(text):
            self.announced[found[1]] = int(float(found[2]) * _UNITS[found[3]])
            return None
        return None if not text or _DETAIL.match(text) else text

    def text(self, written: int, now: float) -> str | None:
        """The progress line after ``written`` bytes were put to disk; None while nothing is being downloaded."""
        total = sum(self.announced.values())
        if not total or not written:
            return None
        fraction = min(0.99, written / (total * UNPACKED))
        left = (now - self.began) * (1 - fraction) / fraction
        sizes = f"{_gigabytes(total * fraction)} of {_gigabytes(total)} GB"
        return f"downloading and unpacking: {sizes}, about {format_duration(left)} left"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= 5e7 else f"{size / 1e9:.3f}"


def _written(pid: int) -> int:
    """Bytes that the process has written so far; 0 when it cannot be told."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("wchar:")).split()[1])
    return 0


def fetch(lock: Path, speaker: Speaker) -> int:
    """Download, unpack and link the packages of ``lock``. Returns uv's exit code."""
    command = [f"{sys.prefix}/bin/uv", "pip", "install", "--python", sys.executable]
    command += ["--require-hashes", "--no-deps", "--no-progress", "-r", str(lock)]
    environ = {k: v for k, v in os.environ.items() if k not in ("UV_SYSTEM_PYTHON", "UV_COMPILE_BYTECODE")}
    download = Download()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ, cwd=ROOT)
    assert process.stderr is not None

    def listen(lines: Iterable[str]) -> None:
        for line in lines:
            if (text := download.read(line)) is not None:
                speaker.passed_on(text)

    listener = threading.Thread(target=listen, args=(process.stderr,))
    listener.start()
    while listener.is_alive():
        if text := download.text(_written(process.pid), time.monotonic()):
            speaker.progress(text)
        listener.join(1.0)
    return process.wait()


def compile_all(speaker: Speaker) -> None:
    """Byte code for every file that has none yet. A start without it takes twice as long."""
    folder = sysconfig.get_path("purelib")
    files = [str(path) for path in Path(folder).rglob("*.py")]
    speaker.line(f"compiling {len(files)} files to byte code")
    began = time.monotonic()
    workers = len(os.sched_getaffinity(0))
    reader, writer = os.pipe()
    children = []
    for number in range(workers):
        pid = os.fork()
        if pid == 0:
            _compile(files[number::workers], writer)
        children.append(pid)
    os.close(writer)
    done = 0
    while ticks := os.read(reader, 4096):
        done += len(ticks)
        left = (time.monotonic() - began) * (len(files) - done) / done
        speaker.progress(f"compiling byte code: {done} of {len(files)} files, about {format_duration(left)} left")
    os.close(reader)
    for pid in children:
        os.waitpid(pid, 0)


def _compile(files: Iterable[str], writer: int) -> None:
    """A child's part: one byte into ``writer`` for each file done. Files that are no Python are passed over."""
    warnings.simplefilter("ignore")
    for file in files:
        with contextlib.suppress(Exception):
            compileall.compile_file(file, quiet=2)
        os.write(writer, b".")
    os._exit(0)


def main() -> int:
    """Install the lock that is named. Returns 0, or uv's exit code with uv's words above."""
    name = sys.argv[1]
    lock = ROOT / f"locks/{name}.txt"
    speaker = Speaker(STATUS)
    try:
        speaker.line(f"installing locks/{name}.txt")
        if code := fetch(lock, speaker):
            return code
        compile_all(speaker)
        kept = Path(sys.prefix) / lock.name
        kept.unlink(missing_ok=True)
        shutil.copyfile(lock, kept)
        return 0
    except KeyboardInterrupt:
        return 130
    finally:
        speaker.end()


if __name__ == "__main__":
    sys.exit(main())
