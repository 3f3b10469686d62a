"""The compose and bake files say what they should, before anything is started or built."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from docker_engine import ROOT, Docker

from entrypoint import __version__
from entrypoint.config import schema
from entrypoint.units import parse_duration

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

# Fixed by the image: the addresses inside it and where its volumes are. A shell that serves without a container may
# have them set; relaunch.env may still say something else.
FIXED = {"HOST", "CONTROL_HOST", "STATE_DIR", "CACHE_DIR"}
# What the gateway alone reads.
GATEWAY = {"REPLICAS"}
# Given as files, never as values.
SECRET = {"API_KEY", "ADMIN_API_KEY", "CONTROL_TOKEN"}
SETTINGS = {record.name: "1234" for record in schema.RECORDS.values()}
SECRETS = {schema.PREFIX + name for name in SECRET}
# What documentation and doctor tell an operator to set, beside the settings.
OTHERS = dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_ALGO", "SGLANG_LOG_MS", "HF_ENDPOINT", "CUDA_VISIBLE_DEVICES"), "1")


@pytest.fixture(scope="module")
def config(docker: Docker) -> dict[str, Any]:
    out = docker("compose", "--profile", "*", "config", "--format", "json", env=SETTINGS).stdout
    document: dict[str, Any] = json.loads(out)["services"]
    return document


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The compose file in a folder of its own, where a test may put a relaunch.env beside it."""
    (tmp_path / "deploy/container").mkdir(parents=True)
    for name in ("compose.yaml", "deploy/container/settings.env"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def environment(docker: Docker, project: Path, service: str = "relaunch", **env: str) -> dict[str, Any]:
    """What ``service`` would have in its environment."""
    words = ("compose", "--profile", "*", "config", "--format", "json")
    found: dict[str, Any] = json.loads(docker(*words, cwd=project, env=env).stdout)["services"][service]["environment"]
    return found


def test_every_setting_of_the_shell_reaches_the_container_under_its_own_name(config: dict[str, Any]) -> None:
    passed = {name for name in config["relaunch"]["environment"] if name.startswith(schema.PREFIX)}
    expected = {name for name in SETTINGS if name.removeprefix(schema.PREFIX) not in FIXED | SECRET | GATEWAY}
    expected |= {f"{name}_FILE" for name in SECRETS}
    assert passed == expected, "add the new setting to deploy/container/settings.env, or to FIXED or SECRET here"
    assert {schema.PREFIX + name for name in GATEWAY} <= set(config["gateway"]["environment"])


def test_the_list_has_every_setting() -> None:
    lines = (ROOT / "deploy/container/settings.env").read_text().splitlines()
    wanted = {name for name in SETTINGS if name.removeprefix(schema.PREFIX) not in FIXED | SECRET | GATEWAY}
    assert {line for line in lines if line.startswith(schema.PREFIX)} == wanted


def test_the_list_names_no_secret_and_nothing_unknown() -> None:
    lines = (ROOT / "deploy/container/settings.env").read_text().splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    assert len(names) == len(set(names)) and not SECRETS & set(names) and "HF_TOKEN" not in names
    assert {name for name in names if name.startswith(schema.PREFIX)} <= set(SETTINGS)


@pytest.mark.parametrize("service", ["relaunch", "gateway"])
def test_every_documented_name_in_relaunch_env_reaches_the_container(
    docker: Docker, project: Path, service: str
) -> None:
    wanted = SETTINGS | OTHERS
    (project / "relaunch.env").write_text("".join(f"{name}={value}\n" for name, value in wanted.items()))
    found = environment(docker, project, service)
    missing = {name for name, value in wanted.items() if found.get(name) != value}
    assert missing == ({"RELAUNCH_REPLICAS"} if service == "gateway" else set())


def test_relaunch_env_wins_over_the_shell(docker: Docker, project: Path) -> None:
    (project / "relaunch.env").write_text("RELAUNCH_TP=8\nRELAUNCH_PP=2\n")
    found = environment(docker, project, RELAUNCH_TP="4", RELAUNCH_EP="4")
    assert (found["RELAUNCH_TP"], found["RELAUNCH_PP"], found["RELAUNCH_EP"]) == ("8", "2", "4")


def test_a_rehearsal_is_not_changed_by_the_settings_of_a_model(docker: Docker, project: Path) -> None:
    (project / "relaunch.env").write_text("RELAUNCH_MODEL=org/name\n")
    found = environment(docker, project, "rehearsal", RELAUNCH_TP="4", RELAUNCH_PRESET="glm-5-nvfp4")
    assert found["RELAUNCH_PRESET"] == "rehearsal" and not {"RELAUNCH_MODEL", "RELAUNCH_TP"} & set(found)


def test_published_ports_lead_to_the_ports_inside(docker: Docker, project: Path) -> None:
    words = ("compose", "config", "--format", "json")
    env = {"RELAUNCH_PORT": "8000", "RELAUNCH_CONTROL_PORT": "8001"}
    service = json.loads(docker(*words, cwd=project, env=env).stdout)["services"]["relaunch"]
    assert [(port["published"], port["target"]) for port in service["ports"]] == [("30000", 8000), ("30001", 8001)]


def test_nothing_set_means_nothing_passed(docker: Docker, project: Path) -> None:
    assert not [name for name, value in environment(docker, project).items() if value]


def test_stop_waits_longer_than_the_drain(config: dict[str, Any]) -> None:
    drain = parse_duration(schema.RECORDS["drain_timeout"].default)
    for service in config.values():
        assert parse_duration(service["stop_grace_period"]) >= drain + 20


def test_probe_asks_readyz_and_waits_for_the_start(config: dict[str, Any]) -> None:
    script = (ROOT / "deploy/container/healthy").read_text()
    assert '"/readyz"' in script
    for service in config.values():
        assert service["healthcheck"]["test"] == ["CMD", "/opt/relaunch/bin/healthy"]
        start = parse_duration(schema.RECORDS["startup_timeout"].default)
        assert parse_duration(service["healthcheck"]["start_period"]) > start


def test_gpu_service_reserves_all_gpus_and_the_rehearsal_none(config: dict[str, Any]) -> None:
    devices = config["relaunch"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"capabilities": ["gpu"], "driver": "nvidia", "count": -1}]
    assert "deploy" not in config["rehearsal"]
    assert config["rehearsal"]["profiles"] == ["rehearsal"]


def test_every_service_is_confined(config: dict[str, Any]) -> None:
    for service in config.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["user"] == "10001:0"
        assert "ipc" not in service and "privileged" not in service
        assert {port["host_ip"] for port in service.get("ports", ())} <= {"127.0.0.1"}
        assert service["restart"] == "unless-stopped"
        assert service["logging"]["options"] == {"max-file": "5", "max-size": "50m"}
        assert service["image"] == "relaunch:local"


def test_shared_memory_is_for_eight_ranks(config: dict[str, Any]) -> None:
    assert int(config["relaunch"]["shm_size"]) >= (8 + 1) << 30


def test_ports_of_the_services_do_not_collide(config: dict[str, Any]) -> None:
    published = [port["published"] for service in config.values() for port in service.get("ports", ())]
    assert len(published) == len(set(published)) == 6
    assert "ports" not in config["replica"], "two containers cannot publish one port"


def test_up_without_a_name_starts_what_it_always_did(docker: Docker) -> None:
    assert docker("compose", "config", "--services").stdout.split() == ["relaunch"]


def test_the_gateway_finds_the_replicas_by_their_services_name(docker: Docker) -> None:
    services = json.loads(docker("compose", "--profile", "gateway", "config", "--format", "json").stdout)["services"]
    assert services["gateway"]["command"] == ["gateway"]
    assert services["gateway"]["environment"]["RELAUNCH_REPLICAS"] == "replica"
    assert services["replica"]["deploy"]["replicas"] == 2
    assert services["replica"]["environment"]["RELAUNCH_PRESET"] == "rehearsal"
    # State of its own for each: a second supervisor on the same state is refused.
    assert {volume.get("source") for volume in services["replica"]["volumes"]} <= {None, ""}
    boxes = docker("compose", "--profile", "gateway", "config", env={"RELAUNCH_REPLICAS": "box-1,box-2"}).stdout
    assert "RELAUNCH_REPLICAS: box-1,box-2" in boxes


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("API_KEY_FILE", "RELAUNCH_API_KEY_FILE: /run/secrets/api_key"),
        ("CONTROL_TOKEN_FILE", "RELAUNCH_CONTROL_TOKEN_FILE: /run/secrets/control_token"),
        ("HF_TOKEN_FILE", "HF_TOKEN_PATH: /run/secrets/hf_token"),
    ],
)
def test_a_secret_comes_from_a_file(name: str, variable: str, docker: Docker, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret")
    out = docker("compose", "config", env={name: str(key), "HF_TOKEN": "s3cret"}).stdout
    assert "s3cret" not in out and variable in out


def test_the_pages_override_for_several_boxes_takes_the_hosts_network(docker: Docker, tmp_path: Path) -> None:
    page = (ROOT / "docs/operations.md").read_text()
    (text,) = re.findall(r"```yaml\n(# compose\.override\.yaml\n.*?)```", page, re.DOTALL)
    override = tmp_path / "override.yaml"
    override.write_text(text)
    words = ("compose", "-f", "compose.yaml", "-f", str(override), "config", "--format", "json")
    env = {"NCCL_IB_DISABLE": "0", "RELAUNCH_NNODES": "2"}
    service = json.loads(docker(*words, env=env).stdout)["services"]["relaunch"]
    assert service["network_mode"] == "host" and not service.get("ports") and not service.get("networks")
    assert service["environment"]["NCCL_IB_DISABLE"] == "0"
    assert "RELAUNCH_NNODES" in service["environment"], "merged, not replaced"


def test_the_bake_file_builds_the_same_images_with_the_locks_versions(docker: Docker) -> None:
    env = {"ATTEST": "true", "REVISION": "0123abc"}
    plan = json.loads(docker("buildx", "bake", "--print", "engine", "plain", "warm", env=env).stdout)["target"]
    assert {name: target["args"]["VARIANT"] for name, target in plan.items()} == {
        "engine": "engine",
        "plain": "plain",
        "warm": "engine",
    }
    assert all(target["args"]["REVISION"] == "0123abc" and len(target["attest"]) == 2 for target in plan.values())
    assert plan["warm"]["args"]["WARM"] == "all" and "relaunch:local" in plan["engine"]["tags"]
    assert len({tag for target in plan.values() for tag in target["tags"]}) == 6, "no image under two names of another"


def test_defaults_of_the_labels_are_the_lock_s() -> None:
    given = dict(re.findall(r"^ARG (SGLANG|TORCH|FLASHINFER|LOCK)=(\S+)", (ROOT / "Dockerfile").read_text(), re.M))
    lock = (ROOT / "locks/engine.txt").read_bytes()
    versions = dict(re.findall(r"^(sglang|torch|flashinfer-python)==(\S+)", lock.decode(), re.M))
    assert given == {
        "SGLANG": versions["sglang"],
        "TORCH": versions["torch"],
        "FLASHINFER": versions["flashinfer-python"],
        "LOCK": f"sha256:{hashlib.sha256(lock).hexdigest()}",
    }


def test_defaults_of_version_are_the_package_s() -> None:
    for name in ("Dockerfile", "docker-bake.hcl"):
        found = re.search(r'(?:ARG VERSION=|variable "VERSION" \{\s+default = ")([\w.]+)', (ROOT / name).read_text())
        assert found and found[1] == __version__, name


def test_the_engine_s_lock_is_split_into_parts_that_together_are_the_lock(tmp_path: Path) -> None:
    """The Dockerfile's own program, run here: no package lost, none twice, CUDA and torch apart from the rest."""
    program = re.search(r"awk '(.*?)' /tmp/lock.txt", (ROOT / "Dockerfile").read_text().replace("\\\n", ""))
    assert program
    lock = ROOT / "locks/engine.txt"
    subprocess.run(["awk", program[1].replace("/tmp/", f"{tmp_path}/"), str(lock)], check=True)
    parts = {path.stem: path.read_text().splitlines() for path in tmp_path.iterdir()}
    assert sorted(line for lines in parts.values() for line in lines) == sorted(lock.read_text().splitlines())
    names = {part: {line.split("==")[0] for line in lines if "==" in line} for part, lines in parts.items()}
    assert names["cuda"] >= {"nvidia-cublas", "nvidia-nccl-cu13", "nvidia-cuda-nvcc"} and "torch" in names["torch"]
    assert names["engine"] >= {"sglang", "sglang-kernel", "flashinfer-python", "nvidia-cutlass-dsl"}
    assert len(names["rest"]) > 100
