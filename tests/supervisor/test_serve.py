"""`relaunch serve` with the fake tree in sglang's place: rare faults, in seconds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from supervisor import Supervisor

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
SECRET = "sentinel-admin-key"
pytestmark = pytest.mark.supervisor

Make = Callable[..., Supervisor]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    made: list[Supervisor] = []

    def start(fake: dict[str, object] | None = None, *, real: bool = False, **settings: str) -> Supervisor:
        monkeypatch.setenv("FAKE_ENGINE", json.dumps(fake or {}))
        given = {
            "PRESET": "",
            "MODEL": str(model),
            "DEVICE": "cpu",
            "ENGINE_ARGS": "--load-format dummy",
            "BACKOFF_INITIAL": "100ms",
            "HANG_TIMEOUT": "4s",
        }
        made.append(Supervisor(tmp_path, fake_engine=not real, **(given | settings)))
        return made[-1]

    yield start
    for supervisor in made:
        supervisor.close()


def boots(supervisor: Supervisor) -> int:
    return len(supervisor.history()["boots"])


def test_an_engine_that_floods_its_log_while_it_is_killed_does_no_harm(make: Make) -> None:
    supervisor = make({"flood": True})
    supervisor.until_ready()
    before = boots(supervisor)
    supervisor.engine("scheduler").send_signal(signal.SIGKILL)
    supervisor.until(lambda: boots(supervisor) > before and supervisor.is_ready, 90, "ready again")
    supervisor.terminate()
    assert supervisor.wait(40) == 0
    assert supervisor.leftovers() == []


def test_temporary_files_of_an_engine_go_with_it(make: Make) -> None:
    supervisor = make()
    supervisor.until_ready()
    scratch = Path(supervisor.engine("main").environ()["TMPDIR"])
    (scratch / "left").touch()
    before = boots(supervisor)
    supervisor.engine("main").send_signal(signal.SIGKILL)
    supervisor.until(lambda: boots(supervisor) > before and supervisor.is_ready, 90, "ready again")
    second = Path(supervisor.engine("main").environ()["TMPDIR"])
    assert second.is_dir() and not (scratch / "left").exists()
    supervisor.terminate()
    assert supervisor.wait(40) == 0
    assert not scratch.exists() and not second.exists()


def test_probes_say_no_from_the_moment_a_part_is_gone(make: Make) -> None:
    supervisor = make({"dying_seconds": 5})
    supervisor.until_ready()
    time.sleep(1.0)
    supervisor.engine("scheduler").send_signal(signal.SIGKILL)
    assert supervisor.until(lambda: not supervisor.is_ready, 5, "not ready") < 0.9
    assert not any(supervisor.is_ready for _ in range(5)), "and go on saying it"


def test_a_supervisor_that_is_killed_leaves_nothing_that_the_next_one_does_not_end(make: Make, tmp_path: Path) -> None:
    shm = Path(f"/dev/shm/sglang_test_serve_{os.getpid()}.shm")
    first = make({"shm": str(shm), "death_signal_after": 60, "orphan_session": True})
    first.until_ready()
    time.sleep(0.7)
    first.process.kill()
    first.process.wait()
    second = make({}, PORT=str(first.port))
    second.until_ready()
    assert not shm.exists()
    assert "left by an earlier supervisor" in second.log
    second.terminate()
    assert second.wait(40) == 0
    assert second.leftovers() == []


@pytest.mark.parametrize(
    "junk", [b"\xff\xfe\n", b"[" * 200_000 + b"\n", b'{"schema": 1, "id": "x", "started_at": "y"}\n']
)
def test_damaged_state_is_passed_over(make: Make, tmp_path: Path, junk: bytes) -> None:
    state = tmp_path / "state"
    (state / "post-mortems").mkdir(parents=True)
    (state / "boots.jsonl").write_bytes(junk)
    (state / "post-mortems" / "20260101T000000Z-x.json").write_bytes(junk)
    (state / "post-mortems" / "20260101T000001Z-x.json").write_text('{"schema": 1, "evidence": 5, "action": ["x"]}')
    supervisor = make()
    supervisor.until_ready()
    assert supervisor.get("/history")[0] == 200
    assert supervisor.get("/status")[0] == 200


def test_a_start_that_takes_too_long_is_a_hang_of_ours_to_name(make: Make) -> None:
    supervisor = make({"start_seconds": 60}, STARTUP_TIMEOUT="2s", MAX_RESTARTS="0")
    assert supervisor.process.wait(60) == 70
    document = json.loads(next((supervisor.state / "post-mortems").glob("*.json")).read_text())
    assert (document["cause"], document["gave_up"]) == ("hang_startup", True)
    assert "STARTUP_TIMEOUT" in document["alarm"]


def test_an_answer_without_the_form_of_one_is_degenerate_output(make: Make) -> None:
    supervisor = make({"embedding": ["a", "b"]}, MAX_RESTARTS="0")
    assert supervisor.process.wait(60) == 70
    document = json.loads(next((supervisor.state / "post-mortems").glob("*.json")).read_text())
    assert document["cause"] == "degenerate_output"


def test_nan_is_named_and_the_caches_are_cleared_first(make: Make) -> None:
    supervisor = make({"nan": True}, MAX_RESTARTS="1")
    supervisor.process.wait(90)
    first = json.loads(min((supervisor.state / "post-mortems").glob("*.json")).read_text())
    assert (first["cause"], first["action"]) == ("nan_output", "clear_jit_cache")


@pytest.mark.engine
@pytest.mark.parametrize("delay", [0.0, 0.05, 0.2, 0.5, 1.0])
def test_sigterm_at_any_early_moment_ends_well(make: Make, delay: float) -> None:
    supervisor = make(real=True)  # the command as it is: the fake one imports more first
    time.sleep(delay)
    supervisor.terminate()
    code = supervisor.wait(40)
    # Before the interpreter runs our first line, the signal has its default meaning.
    assert code == 0 or (delay <= 0.2 and code == -signal.SIGTERM), supervisor.log
    assert supervisor.leftovers() == []


def test_a_storm_of_sigterms_ends_in_zero(make: Make) -> None:
    supervisor = make({"drain_seconds": 30, "ignore_term": True})
    supervisor.until_ready()
    for _ in range(20):
        if supervisor.process.poll() is None:
            supervisor.terminate()
        time.sleep(0.05)
    assert supervisor.wait(40) == 0
    assert supervisor.leftovers() == []


def test_a_planned_restart_spends_no_budget_and_writes_no_post_mortem(make: Make) -> None:
    supervisor = make(MAX_RESTARTS="0")
    supervisor.until_ready()
    before = boots(supervisor)
    supervisor.process.send_signal(signal.SIGHUP)
    supervisor.until(lambda: boots(supervisor) > before and supervisor.is_ready, 60, "restarted")
    assert supervisor.history()["post_mortems"] == []


def test_secrets_stand_in_no_command_line_no_state_and_no_answer(make: Make) -> None:
    supervisor = make({"api_key": SECRET}, API_KEY=SECRET, ADMIN_API_KEY=f"{SECRET}-admin")
    supervisor.until_ready()
    assert SECRET not in " ".join(supervisor.engine("main").cmdline())
    config = supervisor.state / "run" / "engine.yaml"
    assert SECRET in config.read_text()
    assert config.stat().st_mode & 0o077 == 0
    supervisor.engine("main").send_signal(signal.SIGKILL)
    supervisor.until(lambda: bool(supervisor.history()["post_mortems"]), 30, "post-mortem")
    texts = [supervisor.log, *(path.read_text() for path in (supervisor.state / "post-mortems").iterdir())]
    texts += [json.dumps(supervisor.get(path)[1]) for path in ("/plan", "/history", "/status")]
    assert not any(SECRET in text for text in texts)


def test_giving_up_by_budget_is_said_in_the_history(make: Make) -> None:
    fake = {"exit_early": 1, "last_words": "nothing that anybody knows"}
    supervisor = make(fake, MAX_RESTARTS="1", ON_GIVE_UP="hold")
    supervisor.until(lambda: supervisor.phase() == "GAVE_UP", 60, "give up")
    rows = supervisor.history()["post_mortems"]
    assert [row["gave_up"] for row in rows] == [False, True]
    supervisor.terminate()
    assert supervisor.wait(20) == 70


@pytest.mark.needs("root")
def test_a_state_disk_that_fills_up_while_serving_does_not_keep_the_server_down(make: Make, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=True)
    try:
        supervisor = make({}, STATE_DIR=str(disk / "state"))
        supervisor.until_ready()
        with contextlib.suppress(OSError), open(disk / "filler", "wb") as file:
            while True:
                file.write(b"x" * 4096)
                file.flush()
        assert os.statvfs(disk).f_bavail == 0
        old = supervisor.engine("main").pid
        supervisor.engine("scheduler").send_signal(signal.SIGKILL)
        supervisor.until(lambda: not supervisor.is_ready, 10, "not ready")
        supervisor.until_ready()
        assert supervisor.engine("main").pid != old
        assert "no space left" in supervisor.log
        supervisor.terminate()
        assert supervisor.wait(40) == 0
    finally:
        supervisor.close()
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_the_history_of_a_state_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    environ = {**os.environ, "RELAUNCH_STATE_DIR": str(tmp_path / "state")}
    told = subprocess.run(
        [sys.executable, "-P", "-m", "entrypoint", "history"], env=environ, capture_output=True, text=True
    )
    assert told.returncode == 73
    assert told.stderr.count("\n") == 1 and "is no directory" in told.stderr
