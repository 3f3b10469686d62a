"""deploy/kubernetes: rendered by the real kustomize, valid against the schemas, and the same service as compose's."""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import manifests
import pytest
import yaml
from jsonschema import ValidationError
from manifests import KUBERNETES, OVERLAYS, ROOT, Document, claims, compose_service, of_kind, overlay, templates

from entrypoint import cli, plan
from entrypoint.config import presets, schema, settings
from entrypoint.engine import command
from entrypoint.errors import Stop
from entrypoint.gateway import replicas
from entrypoint.healing import machine
from entrypoint.units import parse_duration, parse_size

sys.path.insert(0, str(ROOT / "tests/plan"))
from planned import read, rtx

SECRETS = {"api_key": "k-api", "control_token": "k-control", "hf_token": "k-hf"}
# What makes nodes a group.
GROUP = [f"RELAUNCH_{name}" for name in ("TP", "PP", "NNODES", "NODE_RANK", "DIST_INIT_ADDR")]
LABELS = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
LEADER = "relaunch-group-0.relaunch-group.models"


def default(field: str) -> float:
    value = schema.RECORDS[field].default
    return parse_duration(value) if isinstance(value, str) else float(value)


def servers(name: str) -> list[Document]:
    return [pod for pod in pods(name) if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "server"]


def pods(name: str) -> list[Document]:
    return [template for _, template in templates(overlay(name))]


# -- the schemas --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", manifests.VERSIONS)
@pytest.mark.parametrize("name", OVERLAYS)
def test_every_object_is_valid(name: str, version: str) -> None:
    kinds = {"one-box": "StatefulSet", "two-boxes": "LeaderWorkerSet", "replicas": "Deployment"}
    assert of_kind(overlay(name), kinds[name])
    assert not of_kind(overlay(name), "PodTemplate"), "the shared template is no object of its own"
    for found in overlay(name):
        manifests.validate(found, version)


def test_the_service_monitor_is_valid_and_finds_every_control_port(tmp_path: Path) -> None:
    deploy = "../deploy/kubernetes"
    text = f"resources: [{deploy}/overlays/replicas]\ncomponents: [{deploy}/components/service-monitor]\n"
    objects = own_overlay(tmp_path, text)
    (monitor,) = of_kind(objects, "ServiceMonitor")
    manifests.validate(monitor, "1.37")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "relaunch", "key": "control_token"}
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    watched = {
        service["metadata"]["name"]
        for service in of_kind(objects, "Service")
        if wanted <= service["metadata"]["labels"].items()
        and endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    }
    assert watched == {"relaunch-pods", "relaunch-gateway"}
    # The alert on a supervisor that is gone goes by the job's name, which is the Service's.
    assert all("relaunch" in name for name in watched)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("LeaderWorkerSet", "spec.leaderWorkerTemplate.restartPolicy", "Always"),
        ("LeaderWorkerSet", "spec.leaderWorkerTemplate.size", "2"),
        ("LeaderWorkerSet", "spec.leaderWorkerTemplate.worker", {}),
        ("LeaderWorkerSet", "spec.leaderWorkerTemplate.workerTemplate.spec.enableServiceLink", False),
        ("LeaderWorkerSet", "spec.leaderWorkerTemplate.leaderTemplate.spec.terminationGracePeriodSeconds", "90s"),
        ("Service", "spec.publishNotReady", True),
        ("ServiceMonitor", "spec.endpoints.0.bearerToken", "x"),
        ("ServiceMonitor", "spec.endpoints.0.interval", "15"),
    ],
)
def test_the_schemas_refuse_what_is_wrong(kind: str, path: str, value: object) -> None:
    monitor = yaml.safe_load((KUBERNETES / "components/service-monitor/service-monitor.yaml").read_text())
    found = copy.deepcopy(next(f for f in [*overlay("two-boxes"), monitor] if f["kind"] == kind))
    manifests.validate(found, "1.37")
    *steps, last = path.split(".")
    at: Any = found
    for step in steps:
        at = at[int(step) if step.isdecimal() else step]
    at[last] = value
    with pytest.raises(ValidationError):
        manifests.validate(found, "1.37")


# -- the objects fit each other -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OVERLAYS)
def test_names_and_selectors_lead_somewhere(name: str) -> None:
    objects = overlay(name)
    labels = [pod["metadata"]["labels"] for pod in pods(name)]
    if name == "two-boxes":
        labels = [{**found, "leaderworkerset.sigs.k8s.io/worker-index": str(i)} for i, found in enumerate(labels)]
    selectors = [found["spec"]["selector"] for found in of_kind(objects, "Service")]
    selectors += [found["spec"]["selector"]["matchLabels"] for found in of_kind(objects, "PodDisruptionBudget")]
    selectors += [found["spec"]["podSelector"]["matchLabels"] for found in of_kind(objects, "NetworkPolicy")]
    for selector in selectors:
        assert any(selector.items() <= found.items() for found in labels), selector
    maps = {found["metadata"]["name"] for found in of_kind(objects, "ConfigMap")}
    assert len(maps) == 1 and all(re.fullmatch(r"relaunch-settings-\w{10}", found) for found in maps)
    for pod in pods(name):
        (container,) = pod["spec"]["containers"]
        for source in container.get("envFrom", ()):
            assert source["configMapRef"]["name"] in maps
        ports = {port["name"] for port in container["ports"]}
        probes = [container[probe] for probe in container if probe.endswith("Probe")]
        assert {probe["httpGet"]["port"] for probe in probes} <= ports
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        if pod in servers(name):
            volumes |= set(claims(objects))
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    for service in of_kind(objects, "Service"):
        for port in service["spec"]["ports"]:
            assert port["targetPort"] == port["name"]
            assert port["port"] == {"api": 30000, "control": 30001}[port["name"]]


def test_only_the_head_of_two_boxes_answers_clients() -> None:
    services = {found["metadata"]["name"]: found["spec"] for found in of_kind(overlay("two-boxes"), "Service")}
    assert services["relaunch"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    (group,) = of_kind(overlay("two-boxes"), "LeaderWorkerSet")
    # The controller makes a headless Service of its own under this name.
    assert group["metadata"]["name"] not in services
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["leaderTemplate"] == template["workerTemplate"]
    assert (template["size"], template["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")


def test_the_gateway_sees_every_replica_ready_or_not() -> None:
    objects = overlay("replicas")
    services = {found["metadata"]["name"]: found["spec"] for found in of_kind(objects, "Service")}
    assert services["relaunch"]["selector"]["app.kubernetes.io/component"] == "gateway"
    (gateway,) = [t for _, t in templates(objects) if t not in servers("replicas")]
    listed = manifests.pod_environment(gateway, objects)["RELAUNCH_REPLICAS"]
    name = listed.partition(":")[0]
    assert services[name]["clusterIP"] == "None" and services[name]["publishNotReadyAddresses"] is True
    assert [(found.host, found.port, found.control) for found in replicas.parse(listed)] == [(name, 30000, 30001)]
    (copies,) = of_kind(objects, "StatefulSet")
    assert copies["spec"]["replicas"] == 2 and copies["spec"]["serviceName"] == name
    budgets = {found["metadata"]["name"]: found["spec"] for found in of_kind(objects, "PodDisruptionBudget")}
    assert {name: found["maxUnavailable"] for name, found in budgets.items()} == {"relaunch": 1, "relaunch-gateway": 1}


@pytest.mark.parametrize("name", ["one-box", "two-boxes"])
def test_nobody_but_a_person_evicts_the_only_copy(name: str) -> None:
    (budget,) = of_kind(overlay(name), "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 0
    # One that holds after giving up does not block a node's drain.
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_claims_are_each_pods_own_and_the_same_in_every_kind() -> None:
    assert claims(overlay("one-box")) == claims(overlay("two-boxes")) == claims(overlay("replicas"))
    assert set(claims(overlay("one-box"))) == {"state", "cache", "weights"}
    for claim in claims(overlay("one-box")).values():
        assert claim["accessModes"] == ["ReadWriteOnce"]


# -- as compose does it -------------------------------------------------------------------------------------


def bytes_of(quantity: str) -> int:
    """Compose's ``9gb`` and Kubernetes' ``9Gi`` are both powers of two."""
    return parse_size(re.sub(r"(?i)(\d)\s*([gm])(i|b)?$", r"\1\2iB", quantity).replace("g", "G").replace("m", "M"))


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_are_confined_as_compose_confines(name: str) -> None:
    service = compose_service("relaunch")
    user, group = re.fullmatch(r"\$\{RUN_AS:-(\d+):(\d+)\}", service["user"]).groups()  # type: ignore[union-attr]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    for pod in pods(name):
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": service["cap_drop"]},
        }
        context = dict(spec["securityContext"])
        assert context.pop("fsGroupChangePolicy", "OnRootMismatch") == "OnRootMismatch"
        assert context == {
            "runAsNonRoot": True,
            "runAsUser": int(user),
            "runAsGroup": int(group),
            "fsGroup": int(group),
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec)
        (secret,) = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
        assert secret["defaultMode"] == 0o440


@pytest.mark.parametrize("name", OVERLAYS)
def test_places_and_sizes_are_composes(name: str) -> None:
    service = compose_service("relaunch")
    shell: dict[str, str] = {}
    wanted_shm = manifests._interpolate(service["shm_size"], shell)
    wanted_tmp = re.search(r"^/tmp:.*\bsize=(\w+)", service["tmpfs"][0])
    assert wanted_tmp
    places = {manifests._interpolate(volume, shell).rpartition(":")[2] for volume in service["volumes"]}
    for pod in servers(name):
        (container,) = pod["spec"]["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert {mounts[claim] for claim in claims(overlay(name))} == places
        memory = {v["name"]: v["emptyDir"] for v in pod["spec"]["volumes"] if "emptyDir" in v}
        assert {found["medium"] for found in memory.values()} == {"Memory"}
        assert mounts["shm"] == "/dev/shm" and mounts["tmp"] == "/tmp"
        assert bytes_of(memory["shm"]["sizeLimit"]) == bytes_of(wanted_shm)
        assert bytes_of(memory["tmp"]["sizeLimit"]) == bytes_of(wanted_tmp[1])
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        # What lies in memory counts as the pod's.
        needed = bytes_of("9Gi") + bytes_of("8Gi") + 8 * (6 << 30) + (8 << 30)
        assert bytes_of(container["resources"]["requests"]["memory"]) == needed


@pytest.mark.parametrize("name", OVERLAYS)
def test_settings_and_command_line_are_composes(name: str, secret_files: Path) -> None:
    shell = {"RELAUNCH_PRESET": "glm-5-nvfp4", "API_KEY_FILE": "x", "CONTROL_TOKEN_FILE": "x"}
    for rank, pod in enumerate(servers(name)):
        (container,) = pod["spec"]["containers"]
        assert "command" not in container and container["args"] == ["serve"]
        here = environment(pod, name, rank)
        group = {key: here[key] for key in GROUP if key in here}
        assert set(group) == (set(GROUP) if name == "two-boxes" else set())
        compose = manifests.compose_environment("relaunch", {**shell, **group})
        ours, theirs = (load(found, secret_files) for found in (here, compose))
        assert ours.settings == theirs.settings
        assert ours.settings.api_key == "k-api" and ours.settings.control_token == "k-control"
        assert ours.settings.on_give_up == "hold"
        assert built(ours).argv == built(theirs).argv
        differ = built(ours).env.items() ^ built(theirs).env.items()
        assert {key for key, _ in differ} == ({"NCCL_IB_DISABLE"} if name == "two-boxes" else set())


def environment(pod: Document, name: str, rank: int) -> dict[str, str]:
    injected = {"LWS_LEADER_ADDRESS": LEADER, "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(rank)}
    labels = {"leaderworkerset.sigs.k8s.io/worker-index": str(rank)}
    given = (labels, injected) if name == "two-boxes" else (None, None)
    return manifests.pod_environment(pod, overlay(name), *given)


@pytest.fixture
def secret_files(tmp_path: Path) -> Path:
    folder = tmp_path / "secrets"
    folder.mkdir()
    for key, value in SECRETS.items():
        (folder / key).write_text(value + "\n")
    return folder


def load(environ: dict[str, str], secret_files: Path) -> settings.Loaded:
    """Settings as the container would load them, its secrets lying in ``secret_files``."""
    moved = {name: re.sub(r"^/run/secrets(/relaunch)?", str(secret_files), value) for name, value in environ.items()}
    return settings.load(moved, presets.read_all())


def built(loaded: settings.Loaded) -> command.Command:
    box = rtx()
    made = plan.make(loaded, box, read("glm-5-nvfp4"))
    assert made.feasible, made.reasons
    return command.build(loaded, box, made, "/var/cache/huggingface/model", os.environ)


def test_the_gateway_is_composes_and_has_the_replicas_model_and_keys(secret_files: Path) -> None:
    (gateway,) = [pod for pod in pods("replicas") if pod not in servers("replicas")]
    assert gateway["spec"]["containers"][0]["args"] == compose_service("gateway")["command"]
    here = manifests.pod_environment(gateway, overlay("replicas"))
    own = load(here, secret_files).settings
    shell = {"RELAUNCH_REPLICAS": here["RELAUNCH_REPLICAS"], "RELAUNCH_SERVED_MODEL_NAME": "glm-5"}
    shell |= {"API_KEY_FILE": "x", "CONTROL_TOKEN_FILE": "x"}
    compose = load(manifests.compose_environment("gateway", shell), secret_files).settings
    code = "".join(file.read_text() for file in (ROOT / "entrypoint/gateway").glob("*.py"))
    reads = set(re.findall(r"\bsettings\.(\w+)", code)) & set(schema.RECORDS)
    assert {"replicas", "port", "control_port", "api_key", "control_token", "drain_timeout"} <= reads
    assert {field: getattr(own, field) for field in reads} == {field: getattr(compose, field) for field in reads}
    served = load(environment(servers("replicas")[0], "replicas", 0), secret_files).settings
    for field in ("served_model_name", "api_key", "control_token", "drain_timeout"):
        assert getattr(own, field) == getattr(served, field), field


@pytest.mark.parametrize("name", OVERLAYS)
def test_arguments_are_verbs(name: str) -> None:
    for pod in pods(name):
        verb = cli._parser().parse_args(pod["spec"]["containers"][0]["args"]).verb
        assert verb == ("serve" if pod in servers(name) else "gateway")


def test_the_group_is_what_the_settings_call_a_group(secret_files: Path) -> None:
    nodes = servers("two-boxes")
    ranks = [load(environment(pod, "two-boxes", i), secret_files).settings for i, pod in enumerate(nodes)]
    assert [(found.nnodes, found.node_rank, found.tp, found.pp) for found in ranks] == [(2, 0, 8, 2), (2, 1, 8, 2)]
    for found in ranks:
        assert found.dist_init_addr == f"{LEADER}:20000"
        # The head's control port is the group's authority, and the token guards it.
        assert found.control_token and found.control_host == "0.0.0.0"
    gpus = [int(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for pod in nodes]
    assert sum(gpus) == 8 * 2


# -- names, secrets, numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_name_is_a_setting_and_no_secret_is_written_down(name: str) -> None:
    known = {record.name for record in schema.RECORDS.values() if not record.secret}
    files = {f"{record.name}_FILE" for record in schema.RECORDS.values() if record.secret}
    passed_on = {"HF_TOKEN_PATH", "NCCL_IB_DISABLE"}
    assert not of_kind(overlay(name), "Secret")
    written = {key: value for found in of_kind(overlay(name), "ConfigMap") for key, value in found["data"].items()}
    for pod in pods(name):
        for entry in pod["spec"]["containers"][0]["env"]:
            assert "secretKeyRef" not in entry.get("valueFrom", {}), "secrets come as files"
            written[entry["name"]] = entry.get("value", "")
    assert set(written) <= known | files | passed_on, set(written) - known - files - passed_on
    for key in set(written) & (files | {"HF_TOKEN_PATH"}):
        where, file = written[key].rsplit("/", 1)
        assert where == "/run/secrets/relaunch" and file in SECRETS


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_service_of_our_name_sets_nothing(name: str) -> None:
    """Kubernetes gives every pod RELAUNCH_PORT=tcp://... for a Service called relaunch, unless told not to."""
    links = {"RELAUNCH_SERVICE_HOST": "10.0.0.1", "RELAUNCH_PORT": "tcp://10.0.0.1:30000"}
    with pytest.raises(Stop):
        settings.load({**links, "RELAUNCH_PRESET": "glm-5-nvfp4"}, presets.read_all())
    assert all(pod["spec"]["enableServiceLinks"] is False for pod in pods(name))


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_end_has_time_for_drain_and_kill(name: str) -> None:
    needed = default("drain_timeout") + machine.Limits().kill_grace
    for pod in pods(name):
        slept = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        assert needed + slept + 5 <= grace <= needed + slept + 30


@pytest.mark.parametrize("name", OVERLAYS)
def test_probes_follow_the_settings(name: str) -> None:
    for pod in servers(name):
        (container,) = pod["spec"]["containers"]
        start, ready, live = (container[f"{which}Probe"] for which in ("startup", "readiness", "liveness"))
        assert [p["httpGet"]["path"] for p in (start, ready, live)] == ["/startupz", "/readyz", "/livez"]
        window = start["periodSeconds"] * start["failureThreshold"]
        # Every start that the budget allows, after a download into an empty claim at 100 MiB/s.
        download = bytes_of(claims(overlay(name))["weights"]["resources"]["requests"]["storage"]) / (100 << 20)
        assert window >= default("startup_timeout") * (default("max_restarts") + 1) + download
        # A drain is seen within its grace, before the engine turns requests away.
        assert ready["periodSeconds"] * ready["failureThreshold"] <= machine.Limits().drain_grace
        # The supervisor answers within milliseconds; only one that is gone is replaced.
        assert live["periodSeconds"] * live["failureThreshold"] >= 30
    for deployment in of_kind(overlay(name), "Deployment"):
        assert deployment["spec"]["progressDeadlineSeconds"] >= window


@pytest.mark.parametrize("name", OVERLAYS)
def test_others_reach_the_endpoint_and_pods_reach_names_and_https(name: str) -> None:
    (policy,) = of_kind(overlay(name), "NetworkPolicy")
    open_to_all, to_the_namespace, among_ours = policy["spec"]["ingress"]
    assert open_to_all == {"ports": [{"port": "api"}]}
    assert to_the_namespace == {"ports": [{"port": "control"}], "from": [{"podSelector": {}}]}
    ours = [{"podSelector": policy["spec"]["podSelector"]}]
    assert among_ours == {"from": ours}
    out, to_ours = policy["spec"]["egress"]
    assert {port["port"] for port in out["ports"]} == {53, 443} and "to" not in out
    assert to_ours == {"to": ours} and policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_have_an_identity_of_their_own_without_a_token(name: str) -> None:
    (account,) = of_kind(overlay(name), "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert {pod["spec"]["serviceAccountName"] for pod in pods(name)} == {account["metadata"]["name"]}
    assert not of_kind(overlay(name), "RoleBinding")


# -- an operator's own overlay ------------------------------------------------------------------------------


def own_overlay(tmp_path: Path, text: str) -> list[Document]:
    """What ``text`` renders to as mine/kustomization.yaml beside the repository's deploy/."""
    shutil.copytree(KUBERNETES, tmp_path / "deploy/kubernetes")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/kustomization.yaml").write_text(text)
    return manifests.render(tmp_path / "mine")


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_overlay_of_the_documentation_reaches_every_pod(name: str, tmp_path: Path) -> None:
    page = (ROOT / "docs/operations.md").read_text()
    (text,) = re.findall(r"```yaml\n(apiVersion: kustomize.*?)```", page, re.DOTALL)
    if name == "two-boxes":
        kind, path = "kind: LeaderWorkerSet", "/spec/leaderWorkerTemplate/volumeClaimTemplates"
        text = text.replace("kind: StatefulSet", kind).replace("/spec/volumeClaimTemplates", path)
    objects = own_overlay(tmp_path, text.replace("overlays/one-box", f"overlays/{name}"))
    assert {found["metadata"]["namespace"] for found in objects} == {"models"}
    assert [found["kind"] for found in objects if found["kind"] == "ServiceMonitor"]
    (changed,) = of_kind(objects, "ConfigMap")
    assert changed["metadata"]["name"] != of_kind(overlay(name), "ConfigMap")[0]["metadata"]["name"]
    assert changed["data"]["RELAUNCH_PRESET"] == "glm-5.2-nvfp4"
    for _, pod in templates(objects):
        (container,) = pod["spec"]["containers"]
        assert container["image"] == "registry.example/relaunch:1"
        if container["args"] == ["serve"]:
            assert manifests.pod_environment(pod, objects, LABELS)["RELAUNCH_MEMORY_MARGIN"] == "2GiB"
    assert claims(objects)["weights"]["storageClassName"] == "local-nvme"
    for found in objects:
        manifests.validate(found, "1.37")


@pytest.mark.parametrize("name", OVERLAYS)
def test_other_ports_are_the_same_number_everywhere(name: str, tmp_path: Path) -> None:
    page = (ROOT / "docs/operations.md").read_text()
    (text,) = re.findall(r"```yaml\n(apiVersion: kustomize.*?)```", page, re.DOTALL)
    text = text.partition("patches:")[0].replace("overlays/one-box", f"overlays/{name}")
    assert "transformers: [../deploy/kubernetes/ports]" in text
    text = text.replace("literals: [", "literals: [RELAUNCH_PORT=8000, RELAUNCH_CONTROL_PORT=8001, ")
    objects = own_overlay(tmp_path, text)
    numbers = {"api": 8000, "control": 8001}
    for _, pod in templates(objects):
        (container,) = pod["spec"]["containers"]
        assert {port["name"]: port["containerPort"] for port in container["ports"]} == numbers
        environ = manifests.pod_environment(pod, objects, LABELS)
        assert (environ["RELAUNCH_PORT"], environ["RELAUNCH_CONTROL_PORT"]) == ("8000", "8001")
        if "RELAUNCH_REPLICAS" in environ:
            assert environ["RELAUNCH_REPLICAS"] == "relaunch-pods:8000:8001"
    for service in of_kind(objects, "Service"):
        assert all(port["port"] == numbers[port["name"]] for port in service["spec"]["ports"])
    for found in objects:
        manifests.validate(found, "1.37")
