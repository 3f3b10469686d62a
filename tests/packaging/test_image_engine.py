"""The image with the engine, built from the real lock: the rehearsal end to end, the other verbs, kernels for SM120."""

from __future__ import annotations

import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Image
from docker_engine import ROOT, Docker

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(3000)]

# The quickest of the flagship's route, together about four minutes of two cores.
KERNELS = ("moe-routing", "sampling", "norm")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def fetch(url: str, body: dict[str, Any] | None = None, timeout: float = 10.0) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.fixture(scope="module")
def ports(docker: Docker) -> Iterator[dict[str, str]]:
    yield {"REHEARSAL_PORT": str(free_port()), "REHEARSAL_CONTROL_PORT": str(free_port())}
    docker("compose", "--profile", "*", "down", "--volumes", "--timeout", "20", check=False)


def test_image_size(docker: Docker, engine: Image) -> None:
    size = int(docker("image", "inspect", engine.name, "--format", "{{.Size}}").stdout)
    print(f"\nimage {size / 1e9:.1f} GB, build {engine.seconds:.1f} s")
    assert size < 13e9


def test_installed_versions_are_the_labels_and_the_lock(docker: Docker, engine: Image) -> None:
    # A name may stand there twice, for other platforms.
    texts = [(ROOT / f"locks/{name}.txt").read_text() for name in ("engine", "gateway")]
    lock = {row for text in texts for row in re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.M)}
    labels = json.loads(docker("image", "inspect", engine.name).stdout)[0]["Config"]["Labels"]
    for name in ("sglang", "torch", "flashinfer-python"):
        assert (name, labels[f"relaunch.engine.{name}"]) in lock
    run = docker("run", "--rm", "--entrypoint", "cat", engine.name, "/opt/relaunch/sbom.cdx.json")
    document = json.loads(run.stdout)
    digests = {p["name"]: p["value"] for p in document["metadata"]["properties"]}
    assert labels["relaunch.lock"] == f"sha256:{digests['relaunch:lock:engine:sha256']}"
    installed = {(c["name"], c["version"]) for c in document["components"] if c["purl"].startswith("pkg:pypi/")}
    assert installed <= lock and len(installed) > 200


def test_the_build_looked_into_every_binary(docker: Docker, engine: Image) -> None:
    run = docker("run", "--rm", "--entrypoint", "cat", engine.name, "/opt/relaunch/binaries-sm120.json")
    rows = json.loads(run.stdout)
    lines = {row["package"]: row["detail"] for row in rows}
    assert "compiler and headers are both of CUDA 13.0" in lines["nvidia-cuda-nvcc"]
    assert lines["torch"].startswith("code for SM120 in")
    assert "flash_ops.abi3.so" in lines["sglang-kernel"] and "FlashAttention 3" in lines["sglang-kernel"]
    assert "no code for SM120" in lines["sgl-flash-mla"] and "no code for SM120" in lines["sgl-deep-ep"]
    assert {row["verdict"] for row in rows} == {"pass", "warn"}


def test_rehearsal_serves_heals_and_drains(docker: Docker, engine: Image, ports: dict[str, str]) -> None:
    began = time.monotonic()
    docker("compose", "up", "--wait", "--no-build", "rehearsal", env=ports, timeout=900)
    print(f"\nhealthy after {time.monotonic() - began:.1f} s")
    running = docker("compose", "ps", "--format", "json", env=ports).stdout.splitlines()
    assert [json.loads(line)["Service"] for line in running] == ["rehearsal"]
    container = json.loads(running[0])["ID"]
    base, control = (f"http://127.0.0.1:{ports[name]}" for name in ("REHEARSAL_PORT", "REHEARSAL_CONTROL_PORT"))

    status, answer = fetch(f"{base}/v1/embeddings", {"model": "rehearsal", "input": "a question"})
    assert status == 200 and len(answer["data"][0]["embedding"]) == 384

    config = docker.oci(json.loads(docker("inspect", container).stdout)[0]["Config"]["Hostname"])
    process: Any = config["process"]
    assert process["user"]["uid"] == 10001 and process["user"]["gid"] == 0
    assert process["noNewPrivileges"] is True and not process.get("capabilities", {}).get("bounding")
    limits = {limit["type"]: limit["soft"] for limit in process["rlimits"]}
    assert limits["RLIMIT_MEMLOCK"] == 2**64 - 1 and limits["RLIMIT_NOFILE"] == 1048576
    assert limits["RLIMIT_STACK"] == 67108864
    assert config["root"]["readonly"] is True  # type: ignore[index]
    shm = next(m for m in config["mounts"] if m["destination"] == "/dev/shm")  # type: ignore[attr-defined]
    assert f"size={1 << 30}" in shm["options"]

    find = "import psutil;print(*[p.pid for p in psutil.process_iter() if 'scheduler' in ' '.join(p.cmdline())])"
    python = ("exec", container, "/opt/relaunch/venv/bin/python", "-c")
    victim = docker(*python, find).stdout.split()[0]
    docker(*python, f"import os;os.kill({victim}, 9)")
    killed = time.monotonic()
    wait(lambda: fetch(f"{control}/readyz")[0] == 503, 30)
    wait(lambda: fetch(f"{control}/readyz")[0] == 200, 900)
    print(f"ready again {time.monotonic() - killed:.1f} s after kill -9 of the scheduler")
    assert fetch(f"{base}/v1/embeddings", {"model": "rehearsal", "input": "again"})[0] == 200
    state = json.loads(docker("inspect", container).stdout)[0]
    assert state["RestartCount"] == 0 and state["State"]["Running"]
    assert len(fetch(f"{control}/history")[1]["post_mortems"]) == 1

    began = time.monotonic()
    docker("compose", "stop", "rehearsal", env=ports, timeout=120)
    state = json.loads(docker("inspect", container).stdout)[0]["State"]
    print(f"docker stop took {time.monotonic() - began:.1f} s, exit {state['ExitCode']}")
    assert state["ExitCode"] == 0 and not state["OOMKilled"]


def wait(condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if condition():
                return
        except OSError:
            pass
        time.sleep(0.3)
    raise AssertionError(f"not within {seconds} s")


def test_other_verbs_run_as_compose_commands(docker: Docker, engine: Image, ports: dict[str, str]) -> None:
    run = ("compose", "run", "--rm", "--no-deps", "-T", "rehearsal")
    plan = json.loads(docker(*run, "plan", "--json", env=ports).stdout)
    assert plan["feasible"] and plan["engine"]["env"]["CUDA_HOME"] == "/opt/relaunch/cuda"
    weights = json.loads(docker(*run, "weights", "verify", "--json", env=ports).stdout)
    assert weights["ok"]
    doctor = docker(*run, "doctor", "--json", env=ports, check=False)
    assert doctor.returncode in (0, 69) and json.loads(doctor.stdout)["checks"]


def test_gpu_service_asks_for_gpus_and_shared_memory(docker: Docker, engine: Image, ports: dict[str, str]) -> None:
    """With a stub in place of NVIDIA's runtime hook the unmodified service starts; the runtime was asked for GPUs."""
    env = {**ports, "RELAUNCH_PRESET": "rehearsal", "PORT": str(free_port()), "CONTROL_PORT": str(free_port())}
    docker("compose", "up", "--no-build", "-d", "relaunch", env=env)
    try:
        container = docker("compose", "ps", "-q", "relaunch", env=env).stdout.strip()
        state = json.loads(docker("inspect", container).stdout)[0]
        request = state["HostConfig"]["DeviceRequests"][0]
        assert (request["Driver"], request["Count"], request["Capabilities"]) == ("nvidia", -1, [["gpu"]])
        config: Any = docker.oci(state["Config"]["Hostname"])
        assert any("nvidia-container-runtime-hook" in hook["path"] for hook in config["hooks"]["prestart"])
        shm = next(m for m in config["mounts"] if m["destination"] == "/dev/shm")
        assert f"size={9 << 30}" in shm["options"]
        assert "RELAUNCH_PRESET=rehearsal" in config["process"]["env"]
    finally:
        docker("compose", "rm", "-fsv", "relaunch", env=env, check=False, timeout=150)


CONFINED = ("--read-only", "--tmpfs", "/tmp:exec", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
STATE, CACHE = "/var/lib/relaunch", "/var/cache/relaunch"


def refusal(docker: Docker, engine: Image, *options: str) -> tuple[int, str]:
    """Exit code and the one line of error of a `serve` that should refuse."""
    run = docker(
        "run",
        "--rm",
        *CONFINED,
        "--user",
        "4321:4321",
        "-e",
        "RELAUNCH_ON_GIVE_UP=exit",
        *options,
        engine.name,
        check=False,
        timeout=200,
    )
    errors = [line for line in run.stderr.splitlines() if "relaunch ERROR" in line or line.startswith("relaunch:")]
    assert len(errors) == 1, run.stderr[-3000:]
    assert "Traceback" not in run.stderr and ";" in errors[0]
    print(f"\n{run.returncode}: {errors[0]}", end="")
    return run.returncode, errors[0]


def test_cache_of_another_user_is_one_line(docker: Docker, engine: Image, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    code, line = refusal(docker, engine, "--tmpfs", STATE, "-v", f"{tmp_path}:{CACHE}")
    assert code == 73 and CACHE in line and "chown -R 4321:4321" in line


def test_read_only_cache_is_one_line(docker: Docker, engine: Image) -> None:
    code, line = refusal(docker, engine, "--tmpfs", STATE, "--tmpfs", f"{CACHE}:ro")
    assert code == 73 and CACHE in line and "mount it writable" in line


def test_full_cache_and_full_state_are_one_line(docker: Docker, engine: Image) -> None:
    for full, other in ((CACHE, STATE), (STATE, CACHE)):
        code, line = refusal(docker, engine, "--tmpfs", f"{full}:size=128k", "--tmpfs", other)
        assert code == 73 and full in line and "free space" in line


def test_missing_gpus_are_one_line_before_any_download(docker: Docker, engine: Image) -> None:
    options = ("--tmpfs", STATE, "--tmpfs", CACHE, "-e", "RELAUNCH_PRESET=glm-5-nvfp4")
    code, line = refusal(docker, engine, *options)
    assert code == 69 and "--gpus all" in line


def test_three_kernels_are_compiled_for_sm120_and_found_again(docker: Docker, engine: Image) -> None:
    """Without a GPU, under the confinement that compose gives; the second run compiles nothing."""
    docker("volume", "create", "warm")
    command = (
        "run",
        "--rm",
        "--read-only",
        "--tmpfs",
        "/tmp:exec,size=4g",
        "--cap-drop",
        "ALL",
        "--user",
        "4321:0",
        "-v",
        "warm:/var/cache/relaunch",
        "--tmpfs",
        "/var/lib/relaunch",
        engine.name,
        "warm",
        "--sm",
        "120",
        "--json",
    )
    try:
        first = json.loads(docker(*command, *KERNELS, timeout=1700).stdout)
        again = json.loads(docker(*command, *KERNELS, timeout=300).stdout)
        for row in first["kernels"]:
            cost = f"{row['cpu_seconds']} s of CPU, {row['peak_bytes'] / 1e9:.2f} GB"
            print(f"\n{row['name']}: {row['result']} in {row['seconds']} s ({cost})", end="")
        assert [row["result"] for row in first["kernels"]] == ["compiled"] * 3
        assert [row["result"] for row in again["kernels"]] == ["found"] * 3
        inside = (
            "run",
            "--rm",
            "-v",
            "warm:/var/cache/relaunch",
            "--entrypoint",
            "/opt/relaunch/venv/bin/python",
            engine.name,
            "-c",
            "import sys;from pathlib import Path;from entrypoint.kernels import fatbin;"
            "print(sorted({f'{i.kind} {i.arch} {i.specific}' for p in Path(sys.argv[1]).rglob('*.so')"
            " for unit in fatbin.read(p) for i in unit}))",
            first["directory"],
        )
        assert docker(*inside).stdout.strip() == "['elf 120 True']"
    finally:
        docker("volume", "rm", "warm", check=False)
