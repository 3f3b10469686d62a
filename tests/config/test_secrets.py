"""A secret that no header can carry is refused at once, and no refusal repeats one."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.config import loading
from entrypoint.errors import Stop

SECRETS = ("API_KEY", "ADMIN_API_KEY", "CONTROL_TOKEN")


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize(
    "value", ["abcd\nefgh", "ab\rcd", "x" * 100_000, "schlüssel", "a\udcffb", "abc\x01d", "two words", "a\ufeffb"]
)
def test_a_key_that_no_header_carries_is_refused(name: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(value, encoding="utf-8", errors="surrogateescape")
    for environ in ({f"RELAUNCH_{name}": value}, {f"RELAUNCH_{name}_FILE": str(file)}):
        with pytest.raises(Stop) as stop:
            loading.load({"RELAUNCH_PRESET": "rehearsal", **environ})
        assert stop.value.exit_code in (66, 78)
        assert value not in stop.value.line() and "efgh" not in stop.value.line()


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_in_place_of_its_file_is_not_repeated(name: str) -> None:
    with pytest.raises(Stop) as stop:
        loading.load({"RELAUNCH_PRESET": "rehearsal", f"RELAUNCH_{name}_FILE": "sk-SECRET"})
    assert stop.value.exit_code == 66 and "SECRET" not in stop.value.line()


def test_a_line_end_at_the_end_of_a_file_is_no_part_of_the_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("abc!~\n")
    loaded = loading.load({"RELAUNCH_PRESET": "rehearsal", "RELAUNCH_API_KEY_FILE": str(tmp_path / "key")})
    assert loaded.settings.api_key == "abc!~"


@pytest.mark.parametrize("text", ["\x1b[2J", "a\x07b", "\ud800", "\x9b31m", "\u202egpj.exe"])
def test_a_refusal_moves_no_cursor(text: str) -> None:
    line = Stop("unknown", f"x {text} y", "z").line()
    assert line.isprintable() and line.encode()
