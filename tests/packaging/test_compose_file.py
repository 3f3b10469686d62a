"""The compose file says what it should, before anything is started."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from docker_engine import ROOT, Docker

from entrypoint.config import schema
from entrypoint.units import parse_duration

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

# Fixed by the image: where things are inside it, and what the published ports lead to.
FIXED = {"HOST", "PORT", "CONTROL_HOST", "CONTROL_PORT", "STATE_DIR", "CACHE_DIR", "ON_GIVE_UP"}
# What the gateway alone reads.
GATEWAY = {"REPLICAS"}
# Given as files, never as values.
SECRET = {"API_KEY", "ADMIN_API_KEY", "CONTROL_TOKEN"}


@pytest.fixture(scope="module")
def config(docker: Docker) -> dict[str, Any]:
    everything = {record.name: "x" for record in schema.RECORDS.values()}
    out = docker("compose", "--profile", "*", "config", "--format", "json", env=everything).stdout
    document: dict[str, Any] = json.loads(out)["services"]
    return document


def test_every_setting_reaches_the_container_under_its_own_name(config: dict[str, Any]) -> None:
    passed = {name for name in config["relaunch"]["environment"] if name.startswith(schema.PREFIX)}
    known = {record.name for record in schema.RECORDS.values()}
    expected = {name for name in known if name.removeprefix(schema.PREFIX) not in FIXED | SECRET | GATEWAY}
    expected |= {f"{schema.PREFIX}{name}_FILE" for name in SECRET}
    assert passed == expected, "add the new setting to `environment` in compose.yaml, or to FIXED or SECRET here"
    assert {schema.PREFIX + name for name in GATEWAY} <= set(config["gateway"]["environment"])


def test_nothing_set_means_nothing_passed(docker: Docker) -> None:
    out = docker("compose", "config", "--format", "json").stdout
    environment = json.loads(out)["services"]["relaunch"]["environment"]
    assert not [name for name, value in environment.items() if value]


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


def test_api_key_comes_from_a_file(docker: Docker, tmp_path: Any) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret")
    out = docker("compose", "config", env={"API_KEY_FILE": str(key)}).stdout
    assert "s3cret" not in out and "RELAUNCH_API_KEY_FILE: /run/secrets/api_key" in out


def test_the_pages_override_for_several_boxes_takes_the_hosts_network(docker: Docker, tmp_path: Path) -> None:
    page = (ROOT / "docs/operations.md").read_text()
    (text,) = re.findall(r"```yaml\n(# compose\.override\.yaml\n.*?)```", page, re.DOTALL)
    override = tmp_path / "override.yaml"
    override.write_text(text)
    words = ("compose", "-f", "compose.yaml", "-f", str(override), "config", "--format", "json")
    service = json.loads(docker(*words, env={"NCCL_IB_DISABLE": "0"}).stdout)["services"]["relaunch"]
    assert service["network_mode"] == "host" and not service.get("ports") and not service.get("networks")
    assert service["environment"]["NCCL_IB_DISABLE"] == "0"
    assert "RELAUNCH_NNODES" in service["environment"], "merged, not replaced"
