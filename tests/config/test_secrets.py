"""A secret that no header can carry is refused at once, and no refusal repeats one."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.config import loading, settings
from entrypoint.errors import Stop
from entrypoint.scrub import Scrubber

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


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("MODEL", "https://user:s3cret@host/org/name", "https://***@host/org/name"),
        ("MODEL", "s3cret@host/org/name", "***@host/org/name"),
        ("GIVE_UP_COMMAND", "curl -H 'Authorization: Bearer s3cret' http://host", "curl ***"),
        ("ENGINE_ARGS", '--hicache-storage-backend-extra-config \'{"key": "s3cret", "b": 1}\'', None),
        ("ENGINE_ARGS", "--ssl-keyfile-password=s3cret --tp 2", None),
    ],
)
def test_what_holds_a_secret_beside_other_things_is_masked(name: str, value: str, shown: str | None) -> None:
    document = settings.load({f"RELAUNCH_{name}": value}, {}).document()
    (row,) = [row for row in document["settings"] if row["name"] == f"RELAUNCH_{name}"]
    assert "s3cret" not in str(row["value"])
    assert shown is None or row["value"] == shown


def test_a_word_without_a_flag_repeats_no_value_before_it() -> None:
    loaded = settings.load({"RELAUNCH_ENGINE_ARGS": '--x {"key":"s3cret", "b": 1}'}, {})
    with pytest.raises(Stop) as stop:
        loaded.check_engine_args()
    assert "s3cret" not in stop.value.line()


@pytest.mark.parametrize(
    "text", ["http://user:s3cret@host/x", "at https://s3cret@host: refused", "ftp://a:s3c@ret@host"]
)
def test_the_user_of_an_address_is_scrubbed(text: str) -> None:
    scrubbed = Scrubber(())(text)
    assert "s3c" not in scrubbed and "***@host" in scrubbed


@pytest.mark.parametrize(
    ("given", "open_to"),
    [
        ({}, []),
        ({"HOST": "0.0.0.0"}, ["RELAUNCH_API_KEY_FILE"]),
        ({"HOST": "::", "CONTROL_HOST": "10.0.0.5"}, ["RELAUNCH_API_KEY_FILE", "RELAUNCH_CONTROL_TOKEN_FILE"]),
        ({"HOST": "0.0.0.0", "API_KEY": "k-1"}, []),
        ({"HOST": "127.0.0.2", "CONTROL_HOST": "::1"}, []),
    ],
)
def test_a_door_that_is_open_to_others_is_told(given: dict[str, str], open_to: list[str]) -> None:
    made = settings.load({f"RELAUNCH_{name}": value for name, value in given.items()}, {}).settings
    assert [line.rpartition(" ")[2] for line in loading.open_doors(made)] == open_to
