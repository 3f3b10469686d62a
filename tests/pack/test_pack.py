"""`relaunch pack` and `relaunch unpack` from end to end, without an index: what is carried, kept and refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))

from fakehub import FakeHub
from weights_kit import REPO, Bench, checkpoint, same_files

from entrypoint import cli
from entrypoint.kernels import carry
from entrypoint.pack import image, make, unpack, wheels
from entrypoint.pack.wheels import LockedWheel

ROOT = Path(__file__).resolve().parents[2]
HERE = "{}.{}".format(*sys.version_info[:2])
WHEEL = b"not really a wheel"

Pack = Callable[..., int]


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of a few files; its one wheel is on this disk, and its `relaunch` prints what it is asked."""
    root = tmp_path / "clone"
    for folder in ("locks", "scripts", "entrypoint/__pycache__", ".venv"):
        (root / folder).mkdir(parents=True)
    for name in ("runtime", "engine", "gateway", "dev"):
        (root / f"locks/{name}.txt").write_text(f"{name}==1\n")
    for name in unpack.LOCKS:
        shutil.copy(root / f"locks/{name}.txt", root / ".venv")  # installed already
    (root / "relaunch").write_text('#!/bin/sh\necho "ran: $0 $*"\n')
    (root / "relaunch").chmod(0o755)
    (root / "relaunch.env").write_text("RELAUNCH_API_KEY=secret\n")
    (root / "entrypoint/__pycache__/x.pyc").write_text("")
    shutil.copy(ROOT / "scripts/unpack", root / "scripts/unpack")
    (tmp_path / "a-1-py3-none-any.whl").write_bytes(WHEEL)
    wheel = LockedWheel(
        "a",
        "1",
        "a-1-py3-none-any.whl",
        hashlib.sha256(WHEEL).hexdigest(),
        str(tmp_path / "a-1-py3-none-any.whl"),
        len(WHEEL),
    )
    monkeypatch.setattr(make, "ROOT", root)
    monkeypatch.setattr(wheels, "of_clone", lambda *_: [wheel])
    monkeypatch.setattr(carry, "describe", lambda _: None)
    return root


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def document(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "pack.json").read_text())
    return found


def packed(tmp_path: Path, *words: str) -> Path:
    out = tmp_path / "pack"
    assert cli.main(["pack", "--out", str(out), *words]) == 0
    return out


def unpacked(out: Path, *words: str) -> int:
    return cli.main(["unpack", str(out), "--no-serve", *words])


def test_a_pack_has_the_clone_the_wheels_and_sums_that_other_tools_read(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RELAUNCH_MODEL", "org/model")
    out = packed(tmp_path)
    assert files(out) == {"SHA256SUMS", "pack.json", "relaunch.tar", "unpack", "wheels/a-1-py3-none-any.whl"}
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=out, check=True)
    assert len((out / "SHA256SUMS").read_text().splitlines()) == 4
    listed = subprocess.run(["tar", "-tf", out / "relaunch.tar"], capture_output=True, text=True, check=True).stdout
    assert "locks/engine.txt" in listed and "relaunch.env" not in listed and "pyc" not in listed
    assert document(out)["settings"] == {"RELAUNCH_MODEL": "org/model"} and document(out)["python"] == HERE
    assert contents_digest(out) in capsys.readouterr().out


def contents_digest(out: Path) -> str:
    return hashlib.sha256((out / "SHA256SUMS").read_bytes()).hexdigest()


def test_every_tracked_folder_that_a_start_needs_is_carried() -> None:
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("no repository here")
    top = {line.partition("/")[0] for line in tracked.stdout.splitlines()}
    for_developers = {"tests", "nix", "benchmarks", "CONTRIBUTING.md", "Dockerfile", "docker-bake.hcl"}
    assert (
        top - set(make.SOURCES) - for_developers == {name for name in top if name.startswith((".", "flake."))}
        and set(make.SOURCES) <= top
    )


def test_a_second_run_writes_what_changed_and_removes_what_went(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = packed(tmp_path)
    before = (out / "wheels/a-1-py3-none-any.whl").stat()
    (tmp_path / "b-2-py3-none-any.whl").write_bytes(b"another")
    digest = hashlib.sha256(b"another").hexdigest()
    more = LockedWheel("b", "2", "b-2-py3-none-any.whl", digest, str(tmp_path / "b-2-py3-none-any.whl"), 7)
    had = wheels.of_clone(clone, tmp_path)
    monkeypatch.setattr(wheels, "of_clone", lambda *_: [*had, more])
    packed(tmp_path)
    assert (out / "wheels/a-1-py3-none-any.whl").stat().st_ctime_ns == before.st_ctime_ns
    monkeypatch.setattr(wheels, "of_clone", lambda *_: [more])
    packed(tmp_path)
    assert [path.name for path in (out / "wheels").iterdir()] == ["b-2-py3-none-any.whl"]
    assert unpacked(out) == 0


def test_a_disk_too_small_is_refused_before_anything_is_written(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = LockedWheel("a", "1", "a-1-py3-none-any.whl", "0" * 64, "http://127.0.0.1:9/a.whl", 1 << 60)
    monkeypatch.setattr(wheels, "of_clone", lambda *_: [huge])
    for words in ((), ("--check",)):
        assert cli.main(["pack", "--out", str(tmp_path / "pack"), *words]) == 73
        said = capsys.readouterr().err
        assert "no space left" in said and "--out" in said
        assert not (tmp_path / "pack").exists()


def test_check_says_how_much_and_writes_nothing(
    clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pack", "--out", str(tmp_path / "pack"), "--check"]) == 0
    assert "nothing was written" in capsys.readouterr().out and not (tmp_path / "pack").exists()


def test_a_pack_inside_the_clone_is_refused(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pack", "--out", str(clone / "pack")]) == 78
    assert "lie in each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lambda out: (out / "pack.json").unlink(), 66, "not a whole one"),
        (lambda out: (out / "wheels/a-1-py3-none-any.whl").unlink(), 66, "carry it again"),
        (lambda out: (out / "wheels/a-1-py3-none-any.whl").write_bytes(b"Not really a wheel"), 65, "not those"),
        (lambda out: edit(out, python="3.9"), 78, "for CPython 3.9"),
        (lambda out: edit(out, locks={}), 78, "not those of the pack"),
    ],
)
def test_what_is_no_good_pack_for_this_machine_is_refused(
    change: Callable[[Path], None],
    code: int,
    said: str,
    clone: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = packed(tmp_path)
    shutil.copytree(out, tmp_path / "carried")
    change(tmp_path / "carried")
    capsys.readouterr()
    assert unpacked(tmp_path / "carried") == code
    message = capsys.readouterr().err
    assert said in message and "Traceback" not in message


def edit(out: Path, **values: Any) -> None:
    (out / "pack.json").write_text(json.dumps(document(out) | values))


def at(place: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings and hub of the bench for a command line."""
    for name, value in place.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RELAUNCH_MODEL", place.model)
    monkeypatch.setenv("RELAUNCH_STATE_DIR", str(place.root / "state"))
    monkeypatch.setenv("RELAUNCH_CACHE_DIR", str(place.root / "relaunch-cache"))


def test_weights_of_the_hub_are_proven_again_where_no_hub_is(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint(tmp_path / "hub" / REPO)
    with FakeHub(source.parents[1]) as hub:
        here = Bench(tmp_path / "here", hub.url)
        asyncio.run(here.prepare())
    at(here, monkeypatch)
    out = packed(tmp_path, "--weights")
    commit = document(out)["settings"]["RELAUNCH_REVISION"]
    there = Bench(tmp_path / "there", "http://127.0.0.1:9")
    at(there, monkeypatch)
    monkeypatch.delenv("RELAUNCH_MODEL")
    assert unpacked(out) == 0
    snapshot = there.storage / "snapshots" / commit
    assert same_files(snapshot, source) and (snapshot / "config.json").is_symlink()
    for name, value in (*document(out)["settings"].items(), ("RELAUNCH_OFFLINE", "on")):
        monkeypatch.setenv(name, value)
    capsys.readouterr()
    assert cli.main(["weights", "verify", "--full", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["level"] == "full"
    assert unpacked(out) == 0  # a second time: everything is there


def test_weights_that_are_not_here_are_not_packed(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at(Bench(tmp_path / "here", "http://127.0.0.1:9"), monkeypatch)
    assert cli.main(["pack", "--out", str(tmp_path / "pack"), "--weights"]) == 66
    assert not (tmp_path / "pack").exists()


def test_a_directory_of_weights_is_named_where_it_lies_there(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint(tmp_path / "mine")
    here, there = Bench(tmp_path / "here", model=str(model)), Bench(tmp_path / "there")
    at(here, monkeypatch)
    out = packed(tmp_path, "--weights")
    at(there, monkeypatch)
    monkeypatch.delenv("RELAUNCH_MODEL")
    settings = unpack.unpack(out, os.environ, Silent())
    assert settings["RELAUNCH_MODEL"] == str(there.root / "relaunch-cache/models/mine")
    assert same_files(Path(settings["RELAUNCH_MODEL"]), model)


class Silent:
    def line(self, text: str) -> None:
        pass

    def progress(self, text: str) -> None:
        pass


def test_an_image_is_saved_once_and_given_to_the_engine_there(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a `docker` that notes what it is asked."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "docker").write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\ncase $1 in\n'
        "image) echo sha256:0123456789abcdef 1000 ;;\nsave) echo archive ;;\nload) echo loaded ;;\nesac\n"
    )
    (tools / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    out = packed(tmp_path, "--image")
    packed(tmp_path, "--image")
    assert (out / "image-0123456789ab.tar").read_text() == "archive\n"
    assert unpacked(out) == 0
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked.count("save relaunch:local") == 1
    assert asked[-1] == f"load --quiet --input {out}/image-0123456789ab.tar"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "docker load -i" in image.load(out / "image-0123456789ab.tar")


# -- the command of the other side, before there is anything of relaunch -------------------------------------------


def first_command(out: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(out), "RELAUNCH_PYTHON": "/bin/false", **environ}
    env = {name: value for name, value in env.items() if value}
    return subprocess.run(["sh", str(out / "unpack"), *words], env=env, capture_output=True, text=True, timeout=60)


def test_the_first_command_lays_out_the_clone_and_hands_over(clone: Path, tmp_path: Path) -> None:
    out, target = packed(tmp_path), tmp_path / "there"
    for _ in range(2):  # once more, after a first one that was cut off
        done = first_command(out, str(target), "--no-serve")
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"ran: {target}/relaunch unpack {out} --no-serve\n"


def test_what_is_somebodys_own_stays(clone: Path, tmp_path: Path) -> None:
    out, target = packed(tmp_path), tmp_path / "there"
    target.mkdir()
    (target / "relaunch").write_text("precious")
    assert first_command(out, str(target)).returncode == 73
    assert first_command(out).returncode == 73  # where it was packed there is a clone already
    assert (target / "relaunch").read_text() == "precious"


@pytest.mark.parametrize(("name", "code"), [("relaunch.tar", 65), ("pack.json", 65), ("unpack", 65), ("", 66)])
def test_a_damaged_beginning_is_found_before_it_is_used(name: str, code: int, clone: Path, tmp_path: Path) -> None:
    out = packed(tmp_path)
    if name:
        with (out / name).open("a") as file:
            file.write("\n")
    else:
        (out / "pack.json").unlink()
    done = first_command(out, str(tmp_path / "there"))
    assert done.returncode == code and not (tmp_path / "there").exists()


def test_a_machine_without_that_python_is_told_so(clone: Path, tmp_path: Path) -> None:
    out = packed(tmp_path)
    script = (out / "unpack").read_text().replace(f"3.{sys.version_info[1]}", "3.99")
    (out / "unpack").write_text(script)
    known = (out / "SHA256SUMS").read_text().splitlines()
    known = [line for line in known if not line.endswith("  unpack")]
    (out / "SHA256SUMS").write_text("\n".join([*known, f"{hashlib.sha256(script.encode()).hexdigest()}  unpack\n"]))
    done = first_command(out, str(tmp_path / "there"), RELAUNCH_PYTHON="")
    assert done.returncode == 69 and "CPython 3.99" in done.stderr
