"""The report: what is in it, that nothing secret is, and that a part that cannot be made leaves a reason."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from entrypoint import cli
from entrypoint.doctor import report
from entrypoint.errors import Stop
from entrypoint.state.post_mortems import PostMortems
from entrypoint.ui import completion

SECRETS = ["sk-VeryS3cret", "ctl-VeryS3cret", "hf_VeryS3cretTokenOfMine", "my-own-VeryS3cret"]


def environ(tmp_path: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RELAUNCH_")}
    return {
        **kept,
        "RELAUNCH_MODEL": "generated:gpt2",
        "RELAUNCH_DEVICE": "cpu",
        "RELAUNCH_STATE_DIR": str(tmp_path / "state"),
        "RELAUNCH_CONTROL_PORT": "9",
        "RELAUNCH_API_KEY": SECRETS[0],
        "RELAUNCH_CONTROL_TOKEN": SECRETS[1],
        "HF_TOKEN": SECRETS[2],
        "NCCL_DEBUG": "INFO",
        "SGLANG_SOME_API_KEY": SECRETS[3],
        "HF_HUB_OFFLINE": "1",
    }


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        files = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        return {name.removeprefix("relaunch-report/"): file.read().decode() for name, file in files.items() if file}


def test_everything_is_in_and_no_secret_is(tmp_path: Path) -> None:
    lines = [f"Authorization: Bearer abc, key {SECRETS[0]} {SECRETS[3]}"]
    PostMortems(tmp_path / "state").write(1.8e9, "engine_crash", {"last_lines": lines, "boot": "b"})
    path = report.write(environ(tmp_path), tmp_path / "r.tar.gz")
    assert path.stat().st_mode & 0o777 == 0o600
    files = contents(path)
    wanted = {"versions", "config", "environment", "hardware", "doctor", "plan", "history", "kernel-gpu"}
    assert {f"{name}.json" for name in wanted} <= set(files)
    assert [name for name in files if name.startswith("post-mortems/")]
    for name, text in files.items():
        assert not [secret for secret in SECRETS if secret in text], name
        if name.endswith(".json"):
            json.loads(text)
    assert json.loads(files["environment.json"])["NCCL_DEBUG"] == "INFO"
    assert json.loads(files["plan.json"])["feasible"] is True


def test_a_part_that_fails_leaves_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from entrypoint.doctor import examine

    def broken(_: object) -> None:
        raise RuntimeError(f"no {SECRETS[0]}")

    monkeypatch.setattr(examine, "examine", broken)
    files = contents(report.write(environ(tmp_path), tmp_path / "r.tar.gz"))
    assert json.loads(files["doctor.json"]) == {"not_available": "RuntimeError: no ***"}


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(Stop, match="is no directory"):
        report.output_path(str(tmp_path / "no" / "r.tar.gz"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_know_every_verb(shell: str) -> None:
    text = completion.script(cli._parser(), shell)
    for verb in ("serve", "plan", "weights", "doctor", "history", "report", "completion"):
        assert verb in text
    assert "--json" in text or "-l json" in text


def test_it_lies_where_one_is_but_never_in_the_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert report.default_folder() == tmp_path
    monkeypatch.chdir(Path(__file__).parent)
    assert report.default_folder() == tmp_path / "home"


@pytest.mark.needs("bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [("relaunch we", "weights"), ("relaunch weights v", "verify"), ("relaunch plan --j", "--json")],
)
def test_bash_completes(tmp_path: Path, words: str, expected: str) -> None:
    parts = words.split()
    code = f'COMP_WORDS=({words}); COMP_CWORD={len(parts) - 1}; _relaunch; echo "${{COMPREPLY[@]}}"'
    script = completion.script(cli._parser(), "bash") + code
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, cwd=tmp_path, check=True)
    assert ran.stdout.split() == [expected]
