"""The image without the engine: what it holds, that it is confined, that two builds agree, that a bad mount is one
line with the right exit code."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Image, build, copy_sources
from docker_engine import ROOT, Docker

from entrypoint import __version__
from entrypoint.config import schema

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

# Both ports of a replica, as the gateway sees them.
REPLICA = """
import http.server, socket, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = b'{"object": "list", "data": [{"id": "m"}], "model": "%s"}' % socket.gethostname().encode()
        self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
servers = [http.server.ThreadingHTTPServer(("", port), Handler) for port in (30000, 30001)]
threading.Thread(target=servers[0].serve_forever).start(); servers[1].serve_forever()
"""
ASK = """
import sys, urllib.request
body = sys.argv[2].encode() if sys.argv[2:] else None
asked = urllib.request.Request("http://127.0.0.1:" + sys.argv[1], body, {"content-type": "application/json"})
print(urllib.request.urlopen(asked, timeout=5).read().decode())
"""

CONFINED = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "4321:4321")


def inspect(docker: Docker, image: Image) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(docker("image", "inspect", image.name).stdout)[0]
    return document


def files(docker: Docker, image: Image, prefix: str) -> dict[str, str]:
    """Digest of every regular file under ``prefix`` of the image."""
    name = docker("create", image.name).stdout.strip()
    tar = docker.work / f"{name}.tar"
    try:
        docker("export", "-o", str(tar), name)
        with tarfile.open(tar) as archive:
            return {
                member.name: hashlib.sha256(archive.extractfile(member).read()).hexdigest()  # type: ignore[union-attr]
                for member in archive
                if member.isfile() and member.name.startswith(prefix)
            }
    finally:
        docker("rm", "-f", name)
        tar.unlink(missing_ok=True)


def test_labels_name_source_revision_and_version(docker: Docker, plain: Image) -> None:
    labels = inspect(docker, plain)["Config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == __version__
    assert labels["org.opencontainers.image.revision"] == "0123abc"
    base = re.search(r"^FROM python:3.12-slim@(\S+)", (ROOT / "Dockerfile").read_text(), re.M)
    assert base and labels["org.opencontainers.image.base.digest"] == base[1]


def test_it_runs_as_nobody_special_behind_tini(docker: Docker, plain: Image) -> None:
    config = inspect(docker, plain)["Config"]
    assert config["User"] == "10001:0"
    assert config["Entrypoint"] == ["tini", "--", "relaunch"] and config["Cmd"] == ["serve"]
    assert "RELAUNCH_ON_GIVE_UP=hold" in config["Env"]
    assert config["Healthcheck"]["Test"] == ["CMD", "/opt/relaunch/bin/healthy"]


def test_bill_of_materials_lists_what_is_installed(docker: Docker, plain: Image) -> None:
    run = docker("run", "--rm", "--entrypoint", "cat", plain.name, "/opt/relaunch/sbom.cdx.json")
    document = json.loads(run.stdout)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    names = {component["purl"].split("@")[0] for component in document["components"]}
    assert {"pkg:pypi/pydantic", "pkg:pypi/uvicorn", "pkg:deb/debian/tini"} <= names
    for lock in ("runtime", "gateway"):
        locked = hashlib.sha256((ROOT / f"locks/{lock}.txt").read_bytes()).hexdigest()
        assert {"name": f"relaunch:lock:{lock}:sha256", "value": locked} in document["metadata"]["properties"]


def test_verbs_run_confined_with_any_uid(docker: Docker, plain: Image) -> None:
    for verb in ("config", "hardware"):
        run = docker("run", "--rm", *CONFINED, plain.name, verb, "--json")
        json.loads(run.stdout)


def test_the_gateway_starts_confined_and_says_what_it_waits_for(docker: Docker, plain: Image) -> None:
    """No engine, no state, nothing to write; and its own probe is the image's."""
    name = docker("run", "-d", *CONFINED, "-e", "RELAUNCH_REPLICAS=127.0.0.1:9", plain.name, "gateway").stdout.strip()
    try:
        for _ in range(100):
            probe = docker("exec", name, "/opt/relaunch/bin/healthy", check=False)
            if "none of 1 replicas is ready" in probe.stdout:
                break
            time.sleep(0.2)
        assert probe.returncode == 1 and "none of 1 replicas is ready" in probe.stdout
        docker("stop", name)
        assert docker("inspect", "-f", "{{.State.ExitCode}}", name).stdout.strip() == "0"
    finally:
        docker("rm", "-f", name)


def test_a_name_is_as_many_replicas_as_it_has_addresses(docker: Docker, plain: Image) -> None:
    network = docker("network", "create", "replicas").stdout.strip()
    started: list[str] = []

    def start(*words: str) -> str:
        started.append(docker("run", "-d", *CONFINED, "--network", "replicas", *words).stdout.strip())
        return started[-1]

    def until_ready(count: int) -> None:
        for _ in range(100):
            asked = docker("exec", gateway, "python", "-c", ASK, "30001/replicas", check=False).stdout
            rows = json.loads(asked)["replicas"] if asked else []
            if sum(row["in_router"] for row in rows) == count:
                return
            time.sleep(0.2)
        raise AssertionError(f"not {count} replicas: {asked} {docker('logs', gateway).stderr}")

    try:
        for _ in range(2):
            start("--network-alias", "replica", "--entrypoint", "python", plain.name, "-c", REPLICA)
        gateway = start("-e", "RELAUNCH_REPLICAS=replica", plain.name, "gateway")
        until_ready(2)
        ask = ("exec", gateway, "python", "-c", ASK, "30000/v1/embeddings")
        assert '"object": "list"' in docker(*ask, '{"model": "m", "input": "x"}').stdout
        docker("kill", started[0])
        until_ready(1)
        assert started[1][:12] in docker(*ask, '{"model": "m", "input": "x"}').stdout
    finally:
        docker("rm", "-f", *started)
        docker("network", "rm", network)


def test_compose_puts_the_gateway_before_as_many_replicas_as_asked(docker: Docker, plain: Image) -> None:
    """This image has no engine: each replica gives up and says so, which the gateway must have heard from each."""
    env = {"IMAGE": plain.name, "GATEWAY_PORT": "0", "GATEWAY_CONTROL_PORT": "0", "COMPOSE_PROJECT_NAME": "plain"}
    try:
        docker("compose", "up", "-d", "--no-build", "gateway", "replica", env=env)
        running = docker("compose", "ps", "--format", "{{.Service}}", env=env).stdout.split()
        assert sorted(running) == ["gateway", "replica", "replica"]
        ask = ("compose", "exec", "-T", "gateway", "python", "-c", ASK, "30001/replicas")
        for _ in range(150):
            asked = docker(*ask, env=env, check=False).stdout
            rows = json.loads(asked)["replicas"] if asked else []
            reasons = [row["reason"] or "" for row in rows]
            if len(rows) == 2 and all("GAVE_UP: image_mismatch" in reason for reason in reasons):
                break
            time.sleep(0.2)
        assert len(rows) == 2 and all("GAVE_UP: image_mismatch" in reason for reason in reasons), asked
    finally:
        docker("compose", "--profile", "*", "down", "--volumes", "--timeout", "20", env=env, check=False)


def test_every_documented_name_is_in_the_container_s_process(docker: Docker, plain: Image, tmp_path: Path) -> None:
    """Settings, NCCL's and sglang's names from relaunch.env; the hub's token as a file, in no environment."""
    (tmp_path / "deploy/container").mkdir(parents=True)
    for name in ("compose.yaml", "deploy/container/settings.env"):
        shutil.copy(ROOT / name, tmp_path / name)
    wanted = {record.name: "1234" for record in schema.RECORDS.values() if not record.secret}
    wanted |= {"NCCL_P2P_DISABLE": "1", "SGLANG_LOG_MS": "1"}
    (tmp_path / "relaunch.env").write_text("".join(f"{name}={value}\n" for name, value in wanted.items()))
    (tmp_path / "token").write_text("hf_secret")
    (tmp_path / "token").chmod(0o644)
    env = {"IMAGE": plain.name, "HF_TOKEN_FILE": str(tmp_path / "token"), "COMPOSE_PROJECT_NAME": "names"}
    show = ("--entrypoint", "sh", "relaunch", "-c", "env && cat $HF_TOKEN_PATH")
    try:
        out = docker("compose", "run", "--rm", "-T", "--no-deps", *show, cwd=tmp_path, env=env).stdout
    finally:
        docker("compose", "down", "--volumes", cwd=tmp_path, env=env, check=False)
    seen = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    assert {name: seen.get(name) for name in wanted} == wanted
    assert out.endswith("hf_secret") and "hf_secret" not in seen.values()


def test_wrong_verb_keeps_its_exit_code_through_pid_one(docker: Docker, plain: Image) -> None:
    assert docker("run", "--rm", plain.name, "dance", check=False).returncode == 64


def test_nothing_but_the_named_files_reaches_the_builder(docker: Docker, plain: Image) -> None:
    inside = files(docker, plain, "opt/relaunch/app")
    assert inside and not [name for name in inside if "/tests/" in name or name.endswith((".git", "secret"))]


def test_two_builds_of_one_commit_agree(docker: Docker, plain: Image, sources: Path, tmp_path: Path) -> None:
    """From another folder, other file times, an empty build cache: same packages, same files. Only the packages'
    own byte-code may differ: CPython's marshal writes what several workers have interned in another order."""
    clone = copy_sources(sources, tmp_path / "clone")
    again = build(docker, "relaunch:again", "--build-arg", "VARIANT=plain", "--no-cache", context=clone)
    first, second = (files(docker, image, "opt/relaunch") for image in (plain, again))
    docker("rmi", again.name)
    first, second = (
        {name: digest for name, digest in found.items() if not ("/venv/" in name and name.endswith(".pyc"))}
        for found in (first, second)
    )
    assert sum(name.startswith("opt/relaunch/app/") for name in first) > 100
    assert first == second
    print(f"\n{len(first)} files under /opt/relaunch agree; second build from nothing in {again.seconds:.1f} s")


def test_a_change_in_entrypoint_rebuilds_in_seconds(
    docker: Docker, plain: Image, sources: Path, tmp_path: Path
) -> None:
    clone = copy_sources(sources, tmp_path / "clone")
    (clone / "entrypoint/units.py").write_text((clone / "entrypoint/units.py").read_text() + "\n# touched\n")
    touched = build(docker, "relaunch:touched", "--build-arg", "VARIANT=plain", context=clone)
    docker("rmi", touched.name)
    print(f"\nrebuilt in {touched.seconds:.1f} s")
    assert touched.seconds < 20


def test_state_owned_by_another_user_is_one_line(docker: Docker, plain: Image, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    mount = ("-v", f"{tmp_path}:/var/lib/relaunch")
    run = docker("run", "--rm", *CONFINED, *mount, "-e", "RELAUNCH_ON_GIVE_UP=exit", plain.name, check=False)
    assert run.returncode == 73
    one_line(run.stderr, ("/var/lib/relaunch", "belongs to uid 0"))


def test_read_only_state_is_one_line(docker: Docker, plain: Image) -> None:
    mount = ("--tmpfs", "/var/lib/relaunch:ro")
    run = docker("run", "--rm", *CONFINED, *mount, "-e", "RELAUNCH_ON_GIVE_UP=exit", plain.name, check=False)
    assert run.returncode == 73
    one_line(run.stderr, ("/var/lib/relaunch", "ead-only"))


def one_line(text: str, words: tuple[str, ...]) -> None:
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) == 1 and all(word in lines[0] for word in words), text
    assert ";" in lines[0], f"says what is wrong, but not what to do: {lines[0]}"
