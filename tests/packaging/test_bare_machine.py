"""The README's two commands on bare Debian 12 and 13, as an ordinary user with an empty home."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from docker_engine import ROOT, own_folder

SCRIPT = ROOT / "scripts/bare_machine.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bare_machine", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BARE = load()


def test_the_readme_has_the_commands_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "README.md").read_text()
    serve, wait, ask, kill = BARE.readme(text)
    assert (serve, wait, kill) == ("./relaunch serve", "./relaunch wait", "pkill -9 -f sglang::scheduler")
    assert ask.startswith("curl -s http://127.0.0.1:30000/v1/embeddings")
    monkeypatch.setenv("RELAUNCH_PORT", "41000")
    assert "127.0.0.1:41000/" in BARE.readme(text)[2]
    with pytest.raises(BARE.Failed):
        BARE.readme(text.replace("./relaunch wait", "./relaunch wait\n./relaunch plan"))


def test_what_the_readme_asks_to_install_is_all_that_is_there() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    asked = text.partition("apt-get install ")[2].partition("`")[0].split()
    # Certificates come with what a newcomer fetches the clone with.
    assert {*asked, "ca-certificates"} == set(BARE.PACKAGES.split(","))


def test_the_way_to_package_indexes_is_carried_and_no_place_of_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    given = {"PIP_INDEX_URL": "u", "UV_DEFAULT_INDEX": "u", "https_proxy": "p", "SSL_CERT_FILE": "f", "PIP_CERT": "f"}
    kept_here = {"UV_CACHE_DIR": "c", "UV_PYTHON": "p", "PIP_CACHE_DIR": "c", "PIP_TARGET": "t", "HOME": "h"}
    os.environ |= {**given, **kept_here}
    assert BARE.indexes() == given


def test_a_later_configuration_of_pip_wins_by_value() -> None:
    merged = BARE.merged(["[global]\ncert = a\nindex-url = x\n", "[global]\nindex-url = y\nextra-index-url = 1\n 2\n"])
    assert "cert = a" in merged and "index-url = y" in merged and "= x" not in merged and "2" in merged


def test_what_an_earlier_run_left_is_removed_and_one_that_runs_is_not(tmp_path: Path) -> None:
    left, running, other = (tmp_path / name for name in ("relaunch-bare-1", "relaunch-bare-2", "other"))
    for folder in (left, running, other):
        (folder / "root").mkdir(parents=True)
        (folder / "lock").touch()
    with open(running / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        BARE.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "relaunch-bare-2"]


def test_a_folder_of_a_killed_run_is_removed_by_the_next_and_one_in_use_is_not(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for owner in (ended.pid, os.getpid()):
        (tmp_path / f"doors-{owner}-x").mkdir()
    removed: list[Path] = []
    made = own_folder("doors", removed.append, tmp_path)
    assert removed == [tmp_path / f"doors-{ended.pid}-x"] and made.is_dir()


@pytest.mark.packaging
@pytest.mark.timeout(3600)
@pytest.mark.needs("root", "mmdebstrap")
def test_a_newcomer_gets_an_answer_on_bare_machines() -> None:
    """By hand all of it, minutes and 12 GB a suite; in CI the tests alone, on the oldest Python."""
    words = ["bookworm", "--only-tests"] if os.environ.get("CI") else []
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
