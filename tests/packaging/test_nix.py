"""The flake through the real Nix: lock, outputs, checks, the entrypoint alone, the unit, the engine, and a service that
starts, serves and drains. ``NIX_DOOR_DIR`` keeps what was built between runs by hand."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nix_door
import pytest
from docker_engine import may_install, obstacle, own_folder
from nix_door import ROOT, Nix

from entrypoint import __version__

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(1500)]

# 4.3 GB of wheels and 9.5 GB installed, and room to spare for whoever else works here.
ENGINE_BYTES = 35 << 30


@pytest.fixture(scope="module")
def nix() -> Iterator[Nix]:
    if reason := obstacle(("mmdebstrap",)):
        pytest.skip(f"a Nix of its own: {reason}")
    kept = os.environ.get("NIX_DOOR_DIR")
    work = Path(kept) if kept else own_folder("relaunch-nix", nix_door.stop)
    try:
        yield nix_door.start(work)
    finally:
        if not kept:
            nix_door.stop(work)


@pytest.fixture(scope="module")
def launcher(nix: Nix) -> Path:
    """`bin/relaunch` of the entrypoint alone."""
    return nix.build("relaunch") / "bin/relaunch"


@pytest.fixture(scope="module")
def checked(nix: Nix) -> str:
    """The log of `nix flake check`, which builds every check."""
    return nix("flake", "check", "-L", *nix.options, nix.of(), timeout=900).stderr


@pytest.fixture(scope="module")
def engine(nix: Nix) -> Path:
    """`bin/relaunch` with the engine; the environment's own import check is the last step of its build."""
    free = shutil.disk_usage(nix.work).free
    if free < ENGINE_BYTES and not any(nix.work.glob("store/*-relaunch-engine/bin/python")):
        pytest.skip(f"the engine's closure wants {ENGINE_BYTES >> 30} GiB of free disk, {free >> 30} GiB are free")
    began = time.monotonic()
    built = nix.build("default", timeout=1200)
    print(f"\nthe engine's closure in {time.monotonic() - began:.0f} s")
    return built / "bin/relaunch"


def relaunch(launcher: Path, tmp_path: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **environ}
    return subprocess.run([str(launcher), *words], env=env, text=True, capture_output=True, timeout=120)


# -- the flake ----------------------------------------------------------------------------------------------


def test_the_lock_agrees_with_the_flake_offline(nix: Nix, tmp_path: Path) -> None:
    command = ("flake", "metadata", "--offline", "--no-update-lock-file", "--json")
    locked = json.loads(nix(*command, nix.of()).stdout)["locks"]["nodes"]["nixpkgs"]["locked"]
    assert locked["rev"] == json.loads((ROOT / "flake.lock").read_text())["nodes"]["nixpkgs"]["locked"]["rev"]
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(ROOT / "flake.lock", other)
    text = (ROOT / "flake.nix").read_text()
    (other / "flake.nix").write_text(text.replace("nixos-26.05", "nixos-25.11"))
    assert nix(*command, f"path:{other}", check=False).returncode != 0, "a stale lock must be found"


def test_the_outputs_are_where_people_look_for_them(nix: Nix) -> None:
    shown = json.loads(nix("flake", "show", "--json", *nix.options, nix.of()).stdout)
    system = {key: set(value["x86_64-linux"]) for key, value in shown.items() if "x86_64-linux" in value}
    assert system["packages"] == {"default", "relaunch", "image"}
    assert system["apps"] == {"default", "plan", "doctor", "gateway"}
    assert system["checks"] == {"rooms", "argv", "module", "formatting"}
    assert system["devShells"] == {"default"} and "formatter" in system
    assert set(shown["nixosModules"]) == {"default"} and set(shown["overlays"]) == {"default"}


def test_every_check_builds(checked: str) -> None:
    passed = re.search(r"relaunch-rooms> (\d+) passed", checked)
    assert passed and int(passed[1]) > 500, checked[-3000:]


# -- the entrypoint alone -----------------------------------------------------------------------------------


def test_the_entrypoint_alone_is_small_and_byte_compiled(nix: Nix, launcher: Path) -> None:
    closure = nix("path-info", "-S", "--json", str(launcher.parents[1])).stdout
    assert next(iter(json.loads(closure).values()))["closureSize"] < 300 << 20
    package = launcher.parents[1] / "lib/entrypoint"
    code = (package / "supervisor/__pycache__/serve.cpython-312.pyc").read_bytes()
    # Flags 1: bound to a hash and unchecked. Every file of the store has the same time.
    assert code[4:8] == b"\x01\0\0\0"
    (pydantic,) = nix.work.glob("store/*-relaunch-runtime/lib/python3.12/site-packages/pydantic/__pycache__/main.*pyc")
    assert pydantic.read_bytes()[4:8] == b"\x01\0\0\0"
    assert (package / "env/rehearsal.env").exists()


def test_verbs_and_their_exit_codes(launcher: Path, tmp_path: Path) -> None:
    assert relaunch(launcher, tmp_path, "--version").stdout == f"relaunch {__version__}\n"
    settings = json.loads(relaunch(launcher, tmp_path, "config", "--json", RELAUNCH_PORT="8000").stdout)
    assert {"RELAUNCH_PORT": 8000}.items() <= {row["name"]: row["value"] for row in settings["settings"]}.items()
    assert relaunch(launcher, tmp_path, "dance").returncode == 64
    assert relaunch(launcher, tmp_path, "config", RELAUNCH_PROT="1").returncode == 78


def test_plan_as_an_app(nix: Nix, tmp_path: Path) -> None:
    env = {**nix.env, "RELAUNCH_PRESET": "rehearsal-generate", "RELAUNCH_CACHE_DIR": str(tmp_path)}
    command = [str(nix.work / "bin/nix"), "run", *nix.options, nix.of("plan"), "--", "--json"]
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=300)
    assert json.loads(done.stdout)["feasible"], done.stderr[-2000:]


def test_the_gateway_as_an_app(nix: Nix, tmp_path: Path) -> None:
    """The router's own library loads from the store, listens and ends."""
    log = tmp_path / "log"
    with socket.socket() as one, socket.socket() as two:
        for sock in (one, two):
            sock.bind(("127.0.0.1", 0))
        port, control = (sock.getsockname()[1] for sock in (one, two))
    env = {
        **nix.env,
        "RELAUNCH_REPLICAS": "127.0.0.1:9",
        "RELAUNCH_CACHE_DIR": str(tmp_path),
        "RELAUNCH_PORT": str(port),
        "RELAUNCH_CONTROL_PORT": str(control),
    }
    command = [str(nix.work / "bin/nix"), "run", *nix.options, nix.of("gateway")]
    with open(log, "wb") as file:
        running = subprocess.Popen(command, env=env, stdout=file, stderr=file)
    try:
        began = time.monotonic()
        while "router up" not in log.read_text():
            assert running.poll() is None and time.monotonic() - began < 300, log.read_text()[-3000:]
            time.sleep(0.2)
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0, log.read_text()[-3000:]
    finally:
        running.kill()


@pytest.mark.parametrize("door", ["launcher", "engine"])
def test_the_command_line_is_that_of_the_clone(nix: Nix, door: str, request: pytest.FixtureRequest) -> None:
    """`./relaunch` runs these sources under this interpreter, the engine installed beside them."""
    launcher: Path = request.getfixturevalue(door)
    command = [sys.executable, "-P", str(ROOT / "nix/argv.py"), str(nix.flake), str(launcher)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("sglang.launch_server") == 3


# -- the service --------------------------------------------------------------------------------------------


def test_systemd_accepts_the_unit(nix: Nix, checked: str) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None and not may_install():
        pytest.skip("systemd-analyze is not installed here, and nothing is installed unasked (CI=true asks)")
    if tool is None:
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "systemd"], check=True)
        tool = "systemd-analyze"
    page = (ROOT / "docs/operations.md").read_text().partition("### What the units leave open")[2].partition("###")[0]
    analyze = partial(subprocess.run, text=True, capture_output=True, timeout=60)
    for name in ("relaunch.service", "relaunch-gateway.service"):
        unit = nix.build("checks.x86_64-linux.module") / name
        done = analyze([tool, "verify", "--man=no", str(unit)])
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
        security = analyze([tool, "security", "--offline=true", str(unit)])
        exposure = re.search(rf"exposure level for {name}: ([\d.]+)", security.stdout)
        assert exposure and float(exposure[1]) < 3.0, security.stdout[-500:] + security.stderr
        # What is open is open for a reason that the page gives.
        opened = re.findall(r"^\W*✗\W* (\S+)", security.stdout, re.M)
        assert opened and [line for line in opened if line.replace("|", "\\|") not in page] == []


def test_a_misspelt_option_is_an_error(nix: Nix, tmp_path: Path) -> None:
    flake = tmp_path / "flake"
    shutil.copytree(nix.flake, flake)
    checks = flake / "nix/checks.nix"
    checks.write_text(checks.read_text().replace("canary = false;", "canari = false;"))
    done = nix("eval", *nix.options, f"path:{flake}#checks.x86_64-linux.module.unit", check=False)
    assert done.returncode and "canari" in done.stderr


# -- the module, with the real lib of nixpkgs -----------------------------------------------------------------


@pytest.fixture
def with_module(nix: Nix, tmp_path: Path) -> Iterator[Any]:
    """Evaluates the module with a text in the checks' configuration exchanged; its standard output or error."""
    if not nix.real_lib:
        pytest.skip("no lib of nixpkgs: NIXPKGS_LIB names no checkout, and its repository cannot be reached from here")

    def evaluate(old: str, new: str, attribute: str = "refused") -> tuple[int, str]:
        flake = tmp_path / f"flake-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(nix.flake, flake)
        checks = flake / "nix/checks.nix"
        assert old in checks.read_text()
        checks.write_text(checks.read_text().replace(old, new, 1))
        words = ("eval", "--raw", *nix.options, f"path:{flake}#checks.x86_64-linux.module.{attribute}")
        done = nix(*words, check=False)
        return done.returncode, done.stderr if done.returncode else done.stdout

    yield evaluate


@pytest.mark.parametrize("unit", ["unit", "gateway"])
def test_the_stand_in_evaluates_the_module_as_the_real_lib_does(nix: Nix, unit: str, with_module: Any) -> None:
    output = nix.of(f"checks.x86_64-linux.module.{unit}")
    real, stand_in = (
        nix("eval", "--raw", *nix.options_of(name), output).stdout for name in ("nixpkgs-real-lib", "nixpkgs")
    )
    # The package itself is the same derivation, or the texts would differ in ExecStart.
    assert real == stand_in and "ExecStart=" in real


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("port = 8000;", "port = { a = 1; };", "services.relaunch.settings.port"),
        ("canary = false;", "canari = false;", "services.relaunch.settings.canari"),
        ('secrets.api_key = "', 'secrets.api_kee = "', "services.relaunch.secrets.api_kee"),
        ('environment.NCCL_P2P_LEVEL = "SYS";', "environment.NCCL_P2P_LEVEL = 1;", "environment.NCCL_P2P_LEVEL"),
        ("enable = true;", 'enable = "yes";', "services.relaunch.enable"),
        ("package = ours.plain;", 'package = "relaunch";', "services.relaunch.package"),
    ],
)
def test_the_real_types_refuse_by_name(old: str, new: str, said: str, with_module: Any) -> None:
    code, output = with_module(old, new, "unit")
    assert code and said in output, output[-2000:]


def test_every_option_has_a_description_and_a_default_of_its_type(nix: Nix, with_module: Any) -> None:
    """`optionAttrSetToDocList` is what NixOS makes its manual of; it evaluates every default."""
    expression = (
        f"let pkgs = import {nix.work}/nixpkgs-real-lib/pkgs.nix; lib = pkgs.lib; "
        f"made = lib.evalModules {{ modules = [ {nix.flake}/nix/module.nix {{ _module.check = false; }} ]; "
        "specialArgs.pkgs = pkgs; }; in map (o: { inherit (o) name type; text = o.description or null; }) "
        "(lib.optionAttrSetToDocList made.options.services)"
    )
    done = nix("eval", "--impure", "--json", "--expr", expression, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    options = {row["name"]: row for row in json.loads(done.stdout)}
    known = json.loads((ROOT / "nix/settings.json").read_text())
    for name, setting in known.items():
        kind = "secrets" if setting["secret"] else "settings"
        assert options[f"services.relaunch.{kind}.{name}"]["text"], name
    assert all(row["text"] for row in options.values())


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('preset = "glm-5-nvfp4";', "", "neither what to serve"),
        ('replicas = "box-1,box-2";', "", "names no replica"),
        ("port = 9000;", "port = 8000;", "both listen on port 8000"),
        ('"/run/keys/hf-token"', '"${../flake.nix}"', "lies in the store"),
    ],
)
def test_what_cannot_work_is_refused_when_the_system_is_built(old: str, new: str, said: str, with_module: Any) -> None:
    code, output = with_module(old, new)
    assert code == 0 and said in output


def test_what_works_is_not_refused(with_module: Any) -> None:
    assert with_module("port = 8000;", "port = 8001;") == (0, "")


# -- the engine ---------------------------------------------------------------------------------------------


def test_the_engines_compiler_makes_code_for_the_card(engine: Path, tmp_path: Path) -> None:
    """nvcc, cicc and ptxas of the wheels run after their loader was set, with headers of their own version."""
    text = engine.read_text()
    home, python = re.search(r"^cuda=(\S+)$", text, re.M), re.search(r"^exec (\S+) ", text, re.M)
    assert home and python
    (tmp_path / "add.cu").write_text("__global__ void add(float *a, float b) { a[threadIdx.x] += b; }\n")
    command = [f"{home[1]}/bin/nvcc", "-arch=sm_120a", "-cubin", "-o", "add.cubin", "add.cu"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "add.cubin").read_bytes()[:4] == b"\x7fELF"
    header = Path(home[1], "include/cuda_runtime_api.h").read_text(errors="replace")
    assert re.search(r"^#define\s+CUDART_VERSION\s+130\d\d", header, re.M)
    assert Path(home[1], "lib64/stubs/libcuda.so").exists()
    assert "stubs" not in text, "a stub must never be on the library path"
    code = "from importlib.metadata import version as v; print(v('sglang'), v('torch'), v('flashinfer-python'))"
    versions = subprocess.run([python[1], "-c", code], check=True, text=True, capture_output=True, timeout=60)
    assert versions.stdout.split() == ["0.5.23", "2.14.1", "0.7.2"]


def test_the_image_has_the_entrypoint_and_the_places_of_the_other_image(nix: Nix, engine: Path) -> None:
    stream = nix.build("image")
    image = json.loads(subprocess.run([str(stream)], check=True, text=True, capture_output=True).stdout)
    config = image["config"]
    assert config["Entrypoint"][1:] == ["--", str(engine)] and config["Cmd"] == ["serve"]
    # What our Dockerfile sets, this one sets too.
    block = re.search(r"AS image\n(.*?)\nCOPY", (ROOT / "Dockerfile").read_text(), re.S)
    assert block
    asked = set(re.findall(r"((?:RELAUNCH|NVIDIA|HF)_[A-Z_]+=\S+|HOME=\S+|USER=\S+)", block[1]))
    assert len(asked) > 8 and asked <= set(config["Env"])


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def ask(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, None
    except OSError:
        return 0, None


def test_nix_run_serves_the_rehearsal_tells_systemd_and_drains(nix: Nix, engine: Path, tmp_path: Path) -> None:
    port, control = free_ports(2)
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.setblocking(False)
    env = {
        **nix.env,
        "RELAUNCH_PRESET": "rehearsal",
        "RELAUNCH_PORT": str(port),
        "RELAUNCH_CONTROL_PORT": str(control),
        "RELAUNCH_STATE_DIR": str(tmp_path / "state"),
        "RELAUNCH_CACHE_DIR": str(tmp_path / "cache"),
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": "4000000",
    }
    log = tmp_path / "log"
    told = ""
    with log.open("wb") as sink:
        command = [str(nix.work / "bin/nix"), "run", *nix.options, nix.of()]
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
    try:
        deadline = time.monotonic() + 600
        while ask(f"http://127.0.0.1:{control}/readyz")[0] != 200:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            told += drain(manager)
            time.sleep(0.5)
        body = {"model": "default", "input": "The whole product without a GPU"}
        status, answer = ask(f"http://127.0.0.1:{port}/v1/embeddings", body)
        assert status == 200 and len(answer["data"][0]["embedding"]) == 384
        time.sleep(5)
        told += drain(manager)
        assert "READY=1" in told and told.count("WATCHDOG=1") > 3 and "STOPPING" not in told
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0, log.read_text()[-4000:]
        assert "STOPPING=1" in drain(manager)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(90)
        manager.close()


def drain(channel: socket.socket) -> str:
    """What the manager was told since the last look."""
    text = ""
    with contextlib.suppress(BlockingIOError):
        while True:
            text += channel.recv(4096).decode() + "\n"
    return text
