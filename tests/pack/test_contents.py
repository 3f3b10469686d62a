"""Files of a pack: written once, read back, gone on with, refused when they are not what they must be."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from entrypoint.errors import Stop
from entrypoint.pack import contents, download
from entrypoint.pack.contents import Item, copied
from entrypoint.pack.wheels import LockedWheel

BYTES = bytes(range(256)) * 4096


class Shown:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, text: str) -> None:
        pass


class Index:
    """Serves BYTES on loopback. ``breaks_after``: bytes after which a connection is cut, once for each number."""

    def __init__(self) -> None:
        self.breaks_after: list[int] = []
        self.ranges: list[str | None] = []
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = self.headers.get("Range")
                index.ranges.append(asked)
                start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
                body = BYTES[start:]
                self.send_response(206 if asked else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: index.breaks_after.pop()] if index.breaks_after else body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def wheel(self) -> LockedWheel:
        digest = hashlib.sha256(BYTES).hexdigest()
        address = f"http://127.0.0.1:{self.server.server_address[1]}/a-1-py3-none-any.whl"
        return LockedWheel("a", "1", "a-1-py3-none-any.whl", digest, address, len(BYTES))


@pytest.fixture
def index() -> Iterator[Index]:
    made = Index()
    yield made
    made.server.shutdown()
    made.server.server_close()


def client() -> httpx.Client:
    return httpx.Client(trust_env=False)


def test_a_download_that_breaks_off_goes_on_where_it_was(tmp_path: Path, index: Index) -> None:
    index.breaks_after = [300_000, 100_000]
    with client() as http:
        written = contents.write(tmp_path, [download.item(index.wheel, http)], "--out", Shown())
    assert written == {"wheels/a-1-py3-none-any.whl": index.wheel.sha256}
    assert (tmp_path / "wheels/a-1-py3-none-any.whl").read_bytes() == BYTES
    starts = [int((asked or "bytes=0-").removeprefix("bytes=").removesuffix("-")) for asked in index.ranges]
    assert starts[0] == 0 and 0 < starts[1] < starts[2] <= 400_000


def test_a_second_run_goes_on_with_the_part_that_the_first_one_left(tmp_path: Path, index: Index) -> None:
    partial = tmp_path / "wheels/a-1-py3-none-any.whl.part"
    partial.parent.mkdir()
    partial.write_bytes(BYTES[:1000])
    with client() as http:
        item = download.item(index.wheel, http)
        assert contents.bytes_left(tmp_path, [item]) == len(BYTES) - 1000
        contents.write(tmp_path, [item], "--out", Shown())
        assert index.ranges == ["bytes=1000-"]
        assert contents.missing(tmp_path, [item], contents.sums(tmp_path)) == []


def test_bytes_that_are_not_those_of_the_lock_are_refused_and_removed(tmp_path: Path, index: Index) -> None:
    wheel = LockedWheel(**{**vars(index.wheel), "sha256": "0" * 64})
    with client() as http, pytest.raises(Stop) as caught:
        contents.write(tmp_path, [download.item(wheel, http)], "--out", Shown())
    assert caught.value.exit_code == 65 and "instead of 0000" in caught.value.line()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_index_that_is_gone_says_how_to_go_on(tmp_path: Path) -> None:
    wheel = LockedWheel("a", "1", "a.whl", "0" * 64, "http://127.0.0.1:9/a.whl", 5)
    with client() as http, pytest.raises(Stop) as caught:
        contents.write(tmp_path, [download.item(wheel, http)], "--out", Shown())
    assert caught.value.exit_code == 69 and "same command again" in caught.value.line()


def test_a_copy_is_kept_until_its_source_changes(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.write_bytes(b"one")
    out.mkdir()

    def left() -> list[Item]:
        return contents.missing(out, [copied(source, "a/b")], contents.sums(out))

    contents.write(out, left(), "--out", Shown())
    assert (out / "a/b").read_bytes() == b"one" and left() == []
    changed = tmp_path / "changed"
    changed.write_bytes(b"two")
    os.utime(changed, ns=(1, 1))
    changed.replace(source)
    assert len(left()) == 1
    contents.write(out, left(), "--out", Shown())
    assert (out / "a/b").read_bytes() == b"two" and left() == []
    (out / "a/b").unlink()
    assert len(left()) == 1


def test_a_copy_on_another_file_system_has_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)
    (tmp_path / "source").write_bytes(BYTES)
    contents.write(tmp_path, [copied(tmp_path / "source", "copy")], "--out", Shown())
    assert (tmp_path / "copy").read_bytes() == BYTES
    assert (tmp_path / "copy").stat().st_ino != (tmp_path / "source").stat().st_ino


def test_a_line_of_the_journal_that_was_cut_off_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_text(f"{'a' * 64}  whole\n{'b' * 30}")
    assert contents.sums(tmp_path) == {"whole": "a" * 64}


@pytest.mark.parametrize(("hurt", "code", "said"), [("flip", 65, "not those"), ("remove", 66, "carry it again")])
def test_a_pack_is_proven_byte_for_byte(hurt: str, code: int, said: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(BYTES)
    known = {name: contents.digest(tmp_path, name) for name in ("a", "b")}
    contents.prove(tmp_path, known, Shown())
    if hurt == "flip":
        (tmp_path / "b").write_bytes(BYTES[:-1] + b"?")
    else:
        (tmp_path / "b").unlink()
    with pytest.raises(Stop) as caught:
        contents.prove(tmp_path, known, Shown())
    assert caught.value.exit_code == code and str(tmp_path / "b") in caught.value.line()
    assert said in caught.value.line()


def test_space_is_summed_by_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    contents.need_space({tmp_path / "a": 1, tmp_path / "b": 1}, "--out")
    with pytest.raises(Stop) as caught:
        contents.need_space({tmp_path / "a": free // 2, tmp_path / "b/c": free // 2 + 1}, "--out")
    assert caught.value.exit_code == 73 and "--out" in caught.value.line()
