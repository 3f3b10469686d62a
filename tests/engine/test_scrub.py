"""Secrets never leave through a log line."""

from __future__ import annotations

import json

import pytest

from entrypoint.engine.scrub import Scrubber

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
