"""Upgrade and rollback on one state and one cache directory, with the version that the history has before this one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))

from supervisor import ROOT, Supervisor
from weights_kit import checkpoint

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
pytestmark = pytest.mark.supervisor
# Another commit to go back to, such as that of a release.
PREVIOUS = "RELAUNCH_TEST_PREVIOUS"
_ASKED_FOR = os.environ.get(PREVIOUS)


def git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it was before the last commit that changed it."""
    folder = tmp_path_factory.mktemp("previous")
    try:
        last = git("log", "-1", "--format=%H", "--", "entrypoint", "env").decode().strip()
        packed = git("archive", _ASKED_FOR or f"{last}^", "entrypoint", "env")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no earlier version in this copy of the repository: {error}")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        archive.extractall(folder)
    return folder


Serve = Callable[[Path | None], Supervisor]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts this version, or that of a folder, always on the same directories; ready when it returns."""
    made: list[Supervisor] = []
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setenv("FAKE_ENGINE", "{}")

    def start(version: Path | None) -> Supervisor:
        monkeypatch.setenv("PYTHONPATH", str(version or ""))
        engine = "--load-format dummy"
        made.append(
            Supervisor(tmp_path, fake_engine=True, PRESET="", MODEL=str(model), DEVICE="cpu", ENGINE_ARGS=engine)
        )
        made[-1].until_ready()
        return made[-1]

    yield start
    for supervisor in made:
        supervisor.close()


def test_the_earlier_version_is_another_one_and_is_what_runs(previous: Path) -> None:
    files = {path.relative_to(previous): path.read_bytes() for path in previous.rglob("*") if path.is_file()}
    now = {path: (ROOT / path).read_bytes() for path in files if (ROOT / path).exists()}
    assert files != now or len(files) < len(git("ls-files", "entrypoint", "env").splitlines())
    command = [sys.executable, "-P", "-c", "import entrypoint; print(entrypoint.__file__)"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(previous)}, capture_output=True, text=True)
    assert done.stdout.strip() == str(previous / "entrypoint/__init__.py")


def test_upgrade_and_rollback_keep_the_history_and_each_others_caches(
    previous: Path, serve: Serve, tmp_path: Path
) -> None:
    compiled = tmp_path / "cache/jit/kernels-of-another-build/sglang/kernel.so"
    compiled.parent.mkdir(parents=True)
    compiled.write_text("compiled")
    known: set[str] = set()
    for number, version in enumerate((previous, None, previous), 1):
        supervisor = serve(version)
        boots = supervisor.history()["boots"]
        assert len(boots) == number and all(boot["ready_at"] for boot in boots)
        supervisor.terminate()
        assert supervisor.wait() == 0, supervisor.log[-3000:]
        assert supervisor.leftovers() == []
        left = {path.name for path in supervisor.state.iterdir()}
        assert known <= left, "a version removed what another one keeps"
        known = left
        assert compiled.exists()


@pytest.mark.parametrize("upgrade", [True, False])
def test_weights_that_one_version_has_verified_are_so_for_the_other(
    previous: Path, upgrade: bool, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path / "model")

    def weights(version: Path | None, *words: str) -> dict[str, object]:
        env = os.environ | {
            "PYTHONPATH": str(version or ""),
            "RELAUNCH_MODEL": str(model),
            "RELAUNCH_STATE_DIR": str(tmp_path / "state"),
        }
        command = [sys.executable, "-P", "-m", "entrypoint", "weights", *words, "--json"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.stdout, done.stderr
        document: dict[str, object] = json.loads(done.stdout)
        return document

    first, second = (previous, None) if upgrade else (None, previous)
    proven = weights(first, "verify", "--full")
    assert (proven["level"], proven["ok"]) == ("full", True)
    assert weights(second, "status")["level"] == "recorded"
    with next(model.glob("*.safetensors")).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    assert weights(second, "status")["level"] != "recorded"
