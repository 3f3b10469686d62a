"""`relaunch plan --compare`: against a file, the standard input and another version; what is refused and how."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from entrypoint import cli

CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "vocab_size": 100,
    "type_vocab_size": 2,
}


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setenv("RELAUNCH_MODEL", str(tmp_path / "model"))
    monkeypatch.setenv("RELAUNCH_DEVICE", "cpu")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert cli.main(["plan", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def version(folder: Path, body: str) -> Path:
    """Another version whose `relaunch` is this script."""
    folder.mkdir()
    (folder / "program.py").write_text(f"import json, os, sys\n{body}\n")
    (folder / "relaunch").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder}/program.py" "$@"\n')
    (folder / "relaunch").chmod(0o755)
    return folder


def test_a_file_and_the_standard_input_tell_what_a_setting_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run(capsys)
    (tmp_path / "old.json").write_text(json.dumps(before))
    assert run(capsys, "--compare", str(tmp_path / "old.json"))["same"]
    monkeypatch.setenv("RELAUNCH_MAX_RUNNING_REQUESTS", "3")
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(before)))
    told = run(capsys, "--compare", "-")
    rows = {(row["part"], row["name"]): (row["from"], row["to"]) for row in told["changes"]}
    assert rows["plan", "max_running_requests"] == (before["max_running_requests"], 3)
    assert rows["flags", "--max-running-requests"] == (str(before["max_running_requests"]), "3")
    assert not told["same"] and told["plan"]["max_running_requests"] == 3


def test_another_version_is_asked_with_the_same_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = run(capsys)
    config = {"settings": [{"name": "RELAUNCH_GONE", "value": os_value} for os_value in ["on"]]}
    answers = json.dumps({"plan": plan | {"max_total_tokens": 1}, "config": config})
    other = version(
        tmp_path / "other",
        f"assert os.environ['RELAUNCH_DEVICE'] == 'cpu'\nprint(json.dumps(json.loads({answers!r})[sys.argv[1]]))",
    )
    for words in (str(other), str(other / "relaunch")):
        rows = {(row["part"], row["name"]): row["from"] for row in run(capsys, "--compare", words)["changes"]}
        assert rows["plan", "max_total_tokens"] == 1
        assert rows["settings", "RELAUNCH_GONE"] == "on"
        assert rows["settings", "RELAUNCH_PORT"] is None


def test_a_table_shows_both_sides_and_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old.json").write_text(json.dumps(run(capsys)))
    monkeypatch.setenv("RELAUNCH_MAX_RUNNING_REQUESTS", "3")
    assert cli.main(["plan", "--compare", str(tmp_path / "old.json")]) == 0
    shown = capsys.readouterr().out
    assert "max_running_requests" in shown and "here" in shown and "RELAUNCH_MAX_RUNNING_REQUESTS" in shown


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (None, 66, "--compare"),
        ("{}", 66, "has no plan document"),
        ("[1]", 66, "has no plan document"),
        ("\x00\xff", 66, "has no plan document"),
    ],
)
def test_what_is_no_plan_is_refused(
    text: str | None, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "old.json").write_text(text)
    assert cli.main(["plan", "--compare", str(tmp_path / "old.json")]) == code
    message = capsys.readouterr().err
    assert said in message and len(message.splitlines()) == 1


def test_a_version_that_refuses_the_settings_is_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = version(tmp_path / "other", "sys.exit('relaunch: RELAUNCH_NEW is not known; did you mean RELAUNCH_OLD?')")
    assert cli.main(["plan", "--compare", str(other)]) == 78
    said = capsys.readouterr().err
    assert "says: RELAUNCH_NEW is not known" in said and "take them out" in said and "Traceback" not in said
