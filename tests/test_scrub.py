"""Secrets never leave through a log line or an error message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from entrypoint import cli
from entrypoint.errors import Stop
from entrypoint.scrub import Scrubber, from_environment

KEY = "s3ntinel-k'ey"
SCRUB = Scrubber([KEY, "hf_abcdefghijklmnop", None, "ab"])


@pytest.mark.parametrize(
    "line",
    [
        f"server_args={{'model_path': 'm', 'api_key': {KEY!r}, 'port': 1}}",
        f"launch_command --api-key {KEY} --port 1",
        json.dumps({"api_key": KEY}),
        f"Authorization: Bearer {KEY}",
        "token hf_abcdefghijklmnop in use",
    ],
)
def test_known_secrets_are_masked_in_every_spelling(line: str) -> None:
    out = SCRUB(line)
    assert "s3ntinel" not in out
    assert "abcdefghijklmnop" not in out
    assert "***" in out


@pytest.mark.parametrize(
    ("line", "gone"),
    [
        ("{'api_key': 'never-told', 'admin_api_key': 'nor-this'}", ["never-told", "nor-this"]),
        ("--admin-api-key never-told --tp 8", ["never-told"]),
        ("download with hf_QwErTyUiOp123456", ["QwErTyUiOp123456"]),
        ("authorization: bearer eyJhbGciOi", ["eyJhbGciOi"]),
    ],
)
def test_secrets_that_nobody_told_us_are_known_by_their_shape(line: str, gone: list[str]) -> None:
    out = Scrubber(())(line)
    for text in gone:
        assert text not in out


def test_other_lines_pass_unharmed() -> None:
    line = "[2026-11-29 16:41:08 TP0] Load weight end. elapsed=0.02 s, avail mem=21.34 GB \x1b[1;33mabc\x1b[0m"
    assert SCRUB(line) == line
    assert Scrubber(())("'api_key': None") == "'api_key': None"


def test_the_environment_names_the_secrets_also_in_files_and_with_a_line_end(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-a-file\n")
    environ = {"HF_TOKEN": "no-shape-of-its-own\n", "RELAUNCH_API_KEY_FILE": str(tmp_path / "key"), "OTHER": "stays"}
    scrub = from_environment(environ, ["RELAUNCH_API_KEY", "RELAUNCH_ADMIN_API_KEY"])
    assert scrub("no-shape-of-its-own from-a-file stays") == "*** *** stays"


def test_a_secret_file_that_cannot_be_read_does_not_hide_the_error_about_it(tmp_path: Path) -> None:
    environ = {"RELAUNCH_API_KEY_FILE": str(tmp_path / "absent")}
    assert from_environment(environ, ["RELAUNCH_API_KEY"])("text") == "text"


def test_no_refusal_of_any_verb_prints_a_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> int:
        raise Stop("hub_unavailable", "Illegal header value b'Bearer s3cret-token\\n' and s3cret-webhook")

    monkeypatch.setenv("HF_TOKEN", "s3cret-token\n")
    monkeypatch.setenv("RELAUNCH_GIVE_UP_WEBHOOK", "s3cret-webhook")
    monkeypatch.setattr(cli, "_config", refuse)
    assert cli.main(["config"]) == 69
    assert "s3cret" not in capsys.readouterr().err
