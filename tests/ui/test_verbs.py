"""What the command line says of itself: every verb is listed, a slip is answered with the nearest one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entrypoint import cli
from entrypoint.state.lock import Lock

VERBS = (
    "serve gateway wait plan weights doctor config explain history bench check compare tune hardware reset warm "
    "restart report pack unpack test completion"
)


def test_relaunch_alone_lists_every_verb_and_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 64
    listed = [line.split()[0] for line in capsys.readouterr().err.splitlines() if line.startswith("    ")]
    assert [name for name in listed if name in VERBS.split()] == VERBS.split()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["srve"], "verb 'srve' is not known; did you mean serve?"),
        (["restrat"], "did you mean restart?"),
        (["weights", "fetc"], "did you mean fetch?"),
        (["xyz"], "known: serve, gateway"),
    ],
)
def test_a_slip_is_answered_with_the_nearest(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(words)
    said = capsys.readouterr().err
    assert exit_.value.code == 64 and hint in said and len(said.splitlines()) == 1


def test_test_has_help_and_belongs_to_a_clone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["test", "--help"])
    assert exit_.value.code == 0 and "pytest" in capsys.readouterr().out
    assert cli.main(["test"]) == 78
    assert "./relaunch test" in capsys.readouterr().err


def test_a_gateway_without_replicas_is_refused_before_anything_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["gateway", "--check"]) == 78
    assert "RELAUNCH_REPLICAS" in capsys.readouterr().err
    monkeypatch.setenv("RELAUNCH_REPLICAS", "box-1,box-2")
    assert cli.main(["gateway", "--check"]) == 0


def test_reset_while_serving_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RELAUNCH_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("RELAUNCH_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "known-good").mkdir()
    lock = Lock(tmp_path)
    lock.acquire()
    try:
        assert cli.main(["reset"]) == 73
    finally:
        lock.release()
    said = capsys.readouterr().err
    assert (
        f"supervisor {os.getpid()} serves on" in said and "stop it first" in said and (tmp_path / "known-good").is_dir()
    )
    assert cli.main(["reset"]) == 0 and not (tmp_path / "known-good").exists()
