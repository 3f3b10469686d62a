"""Every path that a person may name can be one that this user may not enter: one line and an exit code, in every verb.

An ordinary user gets a folder without any right. Root gets one of somebody else's, in a process without the
capabilities that pass over rights: what an ordinary user is to a path of root's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "engine"))

from supervisor import FAKE_SERVE, free_ports

ROOT = os.geteuid() == 0
DROP = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
NOBODY = 65534
# A plan that needs no GPU and no package.
CPU = {"MODEL": "generated:gpt2", "DEVICE": "cpu"}

pytestmark = pytest.mark.needs(*(["setpriv"] if ROOT else []))

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "locked"
    folder.mkdir()
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    for name in ("state", "cache", "hf"):
        (folder / name).mkdir()
    (folder / "file").write_text("a line\n")
    if ROOT:
        os.chown(folder, NOBODY, NOBODY)
    folder.chmod(0o700 if ROOT else 0)
    yield folder
    folder.chmod(0o700)


@pytest.fixture
def relaunch(tmp_path: Path) -> Run:
    def run(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        own = {"STATE_DIR": str(tmp_path / "state"), "CACHE_DIR": str(tmp_path / "cache")}
        own |= dict(zip(("PORT", "CONTROL_PORT"), map(str, free_ports(2)), strict=True))
        given = {f"RELAUNCH_{name}": value for name, value in (own | settings).items() if name != "HF_HOME"}
        environ = {**os.environ, "HF_HOME": settings.get("HF_HOME", str(tmp_path / "hf")), **given}
        how = ["-c", FAKE_SERVE] if words == ("serve",) else ["-m", "entrypoint", *words]
        command = [*(DROP if ROOT else []), sys.executable, "-P", *how]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, cwd=tmp_path)

    return run


@pytest.mark.parametrize(
    ("verb", "setting", "place"),
    [
        ("plan", "MODEL", "model"),
        ("weights status", "MODEL", "model"),
        ("weights verify", "MODEL", "model"),
        ("weights fetch", "MODEL", "model"),
        ("serve", "MODEL", "model"),
        ("history", "STATE_DIR", "state"),
        ("reset", "STATE_DIR", "state"),
        ("serve", "STATE_DIR", "state"),
        ("reset", "CACHE_DIR", "cache"),
        pytest.param("warm --check", "CACHE_DIR", "cache", marks=pytest.mark.engine),
        pytest.param("warm", "CACHE_DIR", "cache", marks=pytest.mark.engine),
        ("serve", "CACHE_DIR", "cache"),
        ("plan", "HF_HOME", "hf"),
        ("weights status", "HF_HOME", "hf"),
        ("weights fetch", "HF_HOME", "hf"),
        ("serve", "HF_HOME", "hf"),
        ("plan", "GPU_INVENTORY", "file"),
        ("hardware", "GPU_INVENTORY", "file"),
        ("weights verify", "MANIFEST", "file"),
        ("config", "API_KEY_FILE", "file"),
    ],
)
def test_it_is_refused_in_one_line_with_the_setting(
    relaunch: Run, locked: Path, tmp_path: Path, verb: str, setting: str, place: str
) -> None:
    given = {setting: str(locked / place)}
    if setting == "HF_HOME":
        given |= {"MODEL": "org/name", "OFFLINE": "on"}
    elif setting == "MANIFEST":
        given["MODEL"] = str(tmp_path)
    elif setting != "MODEL" and verb != "history":
        given |= CPU
    ran = relaunch(*verb.split(), **given)
    last = ran.stderr.splitlines()[-1] if ran.stderr else ""
    assert ran.returncode in (66, 73, 78), (ran.returncode, ran.stdout[-500:], ran.stderr[-3000:])
    assert "Traceback" not in ran.stderr and "internal error" not in ran.stderr
    assert setting in last and str(locked) in last, ran.stderr[-3000:]


@pytest.mark.parametrize(
    ("setting", "place"), [("MODEL", "model"), ("STATE_DIR", "state"), ("CACHE_DIR", "cache"), ("HF_HOME", "hf")]
)
def test_doctor_names_it_among_its_checks(relaunch: Run, locked: Path, setting: str, place: str) -> None:
    given = {setting: str(locked / place)}
    given |= {"MODEL": "org/name", "OFFLINE": "on"} if setting == "HF_HOME" else {}
    ran = relaunch("doctor", "--json", **given)
    assert ran.returncode == 69, ran.stderr[-3000:]
    failed = [check for check in json.loads(ran.stdout)["checks"] if check["verdict"] == "fail"]
    assert any(str(locked) in check["detail"] for check in failed), failed


@pytest.mark.parametrize(
    "words",
    [["report", "-o", "{}/report.tar.gz"], ["explain", "{}/file"], ["report", "-o", "{}"]],
)
def test_a_file_on_the_command_line_is_refused_in_one_line(relaunch: Run, locked: Path, words: list[str]) -> None:
    ran = relaunch(*(word.format(locked) for word in words))
    assert ran.returncode in (66, 73, 78), ran.stderr[-3000:]
    assert len(ran.stderr.splitlines()) == 1 and str(locked) in ran.stderr


def test_a_plan_does_without_what_was_learned(relaunch: Run, locked: Path) -> None:
    ran = relaunch("plan", STATE_DIR=str(locked / "state"), **CPU)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_report_is_written_all_the_same(relaunch: Run, locked: Path, tmp_path: Path) -> None:
    ran = relaunch("report", "-o", str(tmp_path / "r.tar.gz"), STATE_DIR=str(locked / "state"))
    assert ran.returncode == 0 and (tmp_path / "r.tar.gz").stat().st_size > 0, ran.stderr[-3000:]


# `wait` gives a supervisor fifteen seconds to begin.
@pytest.mark.parametrize("verb", ["restart", pytest.param("wait", marks=pytest.mark.supervisor)])
def test_a_supervisor_that_cannot_be_seen_is_none(relaunch: Run, locked: Path, verb: str) -> None:
    ran = relaunch(verb, STATE_DIR=str(locked / "state"), CONTROL_PORT="1")
    assert ran.returncode in (69, 73, 78) and "Traceback" not in ran.stderr, ran.stderr[-3000:]
