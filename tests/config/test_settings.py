"""Settings: where values come from, and refusals of one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.config import presets, schema, settings
from entrypoint.errors import Stop

PRESETS = {"big": "# A big one\nRELAUNCH_PORT=31000\nRELAUNCH_TP=8\nNCCL_IB_DISABLE=1\n"}


def load(**environ: str) -> settings.Loaded:
    return settings.load({f"RELAUNCH_{k}" if k.isupper() else k: v for k, v in environ.items()}, PRESETS)


def refusal(environ: dict[str, str], known: dict[str, str] | None = None) -> Stop:
    with pytest.raises(Stop) as caught:
        settings.load(environ, PRESETS if known is None else known)
    assert "\n" not in caught.value.line()
    return caught.value


def test_environment_beats_preset_beats_default() -> None:
    loaded = load(PRESET="big", PORT="32000")
    assert (loaded.settings.port, loaded.sources["port"]) == (32000, "environment")
    assert (loaded.settings.tp, loaded.sources["tp"]) == (8, "preset")
    assert (loaded.settings.control_port, loaded.sources["control_port"]) == (30001, "default")


def test_a_preset_passes_other_names_on_unless_the_environment_has_them() -> None:
    assert load(PRESET="big").environment == {"NCCL_IB_DISABLE": "1"}
    given = settings.load({"RELAUNCH_PRESET": "big", "NCCL_IB_DISABLE": "0"}, PRESETS)
    assert given.environment == {}


def test_an_empty_value_is_not_set() -> None:
    assert load(PORT="").sources["port"] == "default"


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("30s", 30), ("5m", 300), ("1h30m", 5400), ("2d", 172800), ("250ms", 0.25)]
)
def test_durations(text: str, seconds: float) -> None:
    assert load(HANG_TIMEOUT=text).settings.hang_timeout == seconds


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 8 << 30), ("512MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("7", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert load(MEMORY_MARGIN=text).settings.memory_margin == size


@pytest.mark.parametrize(
    ("environ", "code", "words"),
    [
        ({"RELAUNCH_PRT": "1"}, 78, ["RELAUNCH_PRT", "did you mean RELAUNCH_PORT"]),
        ({"RELAUNCH_PORT": "http"}, 78, ["RELAUNCH_PORT=http", "the environment"]),
        ({"RELAUNCH_PORT": "70000"}, 78, ["65535"]),
        ({"RELAUNCH_TP": "many"}, 78, ["integer", "or auto"]),
        ({"RELAUNCH_HANG_TIMEOUT": "5q"}, 78, ["duration", "5m"]),
        ({"RELAUNCH_HANG_TIMEOUT": "-3"}, 78, ["duration"]),
        ({"RELAUNCH_MEMORY_MARGIN": "big"}, 78, ["size", "8GiB"]),
        ({"RELAUNCH_VERIFY": "maybe"}, 78, ["recorded", "quick", "full"]),
        ({"RELAUNCH_MEM_FRACTION_STATIC": "95"}, 78, ["less than 1"]),
        ({"RELAUNCH_CANARY": "perhaps"}, 78, ["on or off"]),
        ({"RELAUNCH_PRESET": "bg"}, 78, ["env/", "did you mean big"]),
        ({"RELAUNCH_API_KEY_FILE": "/nowhere/key"}, 66, ["RELAUNCH_API_KEY_FILE", "/nowhere/key"]),
        ({"RELAUNCH_API_KEY": "k1", "RELAUNCH_API_KEY_FILE": "/x"}, 78, ["both set"]),
    ],
)
def test_bad_input_is_refused_in_one_line(environ: dict[str, str], code: int, words: list[str]) -> None:
    stop = refusal(environ)
    assert stop.exit_code == code
    for word in words:
        assert word in stop.line()


def test_a_bad_secret_is_never_shown(tmp_path: Path) -> None:
    stop = refusal({"RELAUNCH_API_KEY": "sentinel-1", "RELAUNCH_API_KEY_FILE": "/x"})
    assert "sentinel-1" not in stop.line()


def test_a_secret_comes_from_a_file_without_its_newline(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sentinel-2\n")
    loaded = settings.load({"RELAUNCH_API_KEY_FILE": str(file)}, {})
    assert loaded.settings.api_key == "sentinel-2"
    assert "sentinel-2" not in str(loaded.document())


def test_an_empty_secret_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\n")
    assert refusal({"RELAUNCH_API_KEY_FILE": str(tmp_path / "key")}).exit_code == 78


def test_config_masks_secrets_and_keys_inside_engine_args() -> None:
    document = load(CONTROL_TOKEN="sentinel-3", ENGINE_ARGS="--admin-api-key sentinel-4 --log-level info").document()
    assert "sentinel" not in str(document)
    rows = {row["name"]: row for row in document["settings"]}
    assert rows["RELAUNCH_CONTROL_TOKEN"]["value"] == "***"
    assert rows["RELAUNCH_ENGINE_ARGS"]["value"] == "--admin-api-key *** --log-level info"


def test_every_setting_says_what_it_is_for() -> None:
    for record in schema.RECORDS.values():
        assert record.help.endswith("."), record.name
        assert record.group


@pytest.mark.parametrize("line", ["export RELAUNCH_PORT=1", 'RELAUNCH_MODEL="x"', "RELAUNCH_MODEL=$HOME/x", "PORT: 3"])
def test_a_preset_line_that_docker_would_read_otherwise_is_refused(line: str) -> None:
    stop = refusal({"RELAUNCH_PRESET": "odd"}, {"odd": f"# fine\n{line}\n"})
    assert "env/odd.env line 2" in stop.line()


def test_a_preset_may_not_hold_secrets_or_unknown_names() -> None:
    assert "line 1" in refusal({"RELAUNCH_PRESET": "p"}, {"p": "RELAUNCH_API_KEY=x"}).line()
    assert "did you mean" in refusal({"RELAUNCH_PRESET": "p"}, {"p": "RELAUNCH_MODLE=x"}).line()


def test_every_shipped_preset_loads_and_says_what_it_is_for() -> None:
    known = presets.read_all()
    assert "glm-5-nvfp4" in known
    assert "rehearsal" in known
    for name, text in known.items():
        loaded = settings.load({"RELAUNCH_PRESET": name}, known)
        assert loaded.settings.model, name
        assert presets.describe(text), name


def test_every_line_of_a_preset_has_its_reason_above_it() -> None:
    for name, text in presets.read_all().items():
        previous = ""
        for line in text.splitlines():
            if "=" in line and not line.startswith("#"):
                assert previous.startswith("#"), f"{name}: {line}"
            previous = line


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RELAUNCH_PORT": "30001"}, "both 30001"),
        ({"RELAUNCH_NODE_RANK": "1"}, "RELAUNCH_NODE_RANK=1"),
        ({"RELAUNCH_NNODES": "2"}, "without RELAUNCH_DIST_INIT_ADDR"),
        ({"RELAUNCH_NNODES": "2", "RELAUNCH_DIST_INIT_ADDR": "zz"}, "host:port"),
    ],
)
def test_settings_that_are_wrong_together_are_refused(environ: dict[str, str], words: str) -> None:
    assert words in refusal(environ).line()


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("GROUP_HEAD", "fd00::1:30001"),
        ("GROUP_HEAD", "[fd00::1:30001"),
        ("GROUP_HEAD", "10.0.0.1:99999"),
        ("GROUP_HEAD", "user@10.0.0.1:30001"),
        ("DIST_INIT_ADDR", "fd00::1:20000"),
        ("DIST_INIT_ADDR", "10.0.0.1:0"),
    ],
)
def test_what_is_no_address_is_refused(name: str, address: str) -> None:
    stop = refusal({f"RELAUNCH_{name}": address})
    assert f"RELAUNCH_{name}={address} is no address" in stop.line() and stop.exit_code == 78


@pytest.mark.parametrize("host", ["[fd00::1]:30001", "[fe80::1%eth0]:1", "node-0.group.svc:30001", "10.0.0.1:30001"])
def test_addresses_that_are_fine(host: str) -> None:
    given = {"RELAUNCH_MODEL": "m", "RELAUNCH_GROUP_HEAD": host, "RELAUNCH_DIST_INIT_ADDR": host}
    assert settings.load(given, {}).settings.group_head == host


def test_a_huge_value_is_not_echoed_whole() -> None:
    assert len(refusal({"RELAUNCH_PORT": "9" * 5000}).line()) < 400
