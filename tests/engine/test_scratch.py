"""The engine's temporary files: a directory of its own, short enough for sockets, empty before and gone after."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from entrypoint.engine import scratch
from entrypoint.errors import Stop


def test_it_lies_in_the_state_directory_where_it_is_short_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    short = Path("/home/somebody/.local/state/relaunch")
    assert scratch.places(short)[0] == short / "run/tmp"
    monkeypatch.chdir("/")
    assert scratch.places(Path("state"))[0] == Path("/state/run/tmp")


@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_long_state_directory_gets_a_short_one_of_its_own(tmp_path: Path, letter: str) -> None:
    for elsewhere in (Path("/var/tmp"), tmp_path / ("y" * 100)):
        one, other = (scratch.places(tmp_path / (letter * n), elsewhere=elsewhere) for n in (90, 91))
        assert one and not {*one} & {*other}  # two supervisors do not share one
        assert all(len(os.fsencode(place)) <= scratch.LONGEST for place in (*one, *other))


def test_the_longest_socket_name_fits_into_the_longest_directory() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        longest = Path(short) / ("d" * (scratch.LONGEST - len(short) - 1))
        (longest / "pymp-xxxxxxxx").mkdir(parents=True)
        with Listener(str(longest / "pymp-xxxxxxxx/listener-xxxxxxxx")):
            pass
        with pytest.raises(OSError):
            Listener(str(longest / "pymp-xxxxxxxx/listener-xxxxxxxxx"))


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A short path, which those of pytest are not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("length", [1, 80])
def test_it_is_made_empty_for_this_user_alone_and_removed(elsewhere: Path, length: int) -> None:
    state = elsewhere / ("s" * length)
    place = scratch.make(state, elsewhere=elsewhere)
    (place / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(place / "left"))
    again = scratch.make(state, elsewhere=elsewhere)
    assert again == place and list(place.iterdir()) == []
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    scratch.remove(state, elsewhere=elsewhere)
    assert not place.exists()
    scratch.remove(state, elsewhere=elsewhere)


def test_a_name_that_is_somebody_elses_is_left_to_them(elsewhere: Path) -> None:
    state = elsewhere / ("s" * 80)
    theirs = elsewhere / "theirs"
    theirs.mkdir()
    (theirs / "file").touch()
    first, second = scratch.places(state, elsewhere=elsewhere)
    first.symlink_to(theirs)
    try:
        assert scratch.make(state, elsewhere=elsewhere) == second
    finally:
        scratch.remove(state, elsewhere=elsewhere)
    assert [path.name for path in theirs.iterdir()] == ["file"]


def test_a_full_disk_is_passed_over(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Stop) as caught:
        scratch.make(elsewhere / "state", elsewhere=elsewhere)
    assert (caught.value.cause, caught.value.exit_code) == ("disk_full", 73)
    assert not any(place.exists() for place in scratch.places(elsewhere / "state", elsewhere=elsewhere))
