"""What the tests of deploy/kubernetes share: the real kustomize, the schemas, and what a container would see."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema.validators import Draft202012Validator
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
OVERLAYS = ("one-box", "two-boxes", "replicas")
# The oldest that knows preStop sleep, and the newest that the schemas are there for.
VERSIONS = ("1.30", "1.37")
RECORDED = {"LeaderWorkerSet": "leaderworkerset", "ServiceMonitor": "servicemonitor"}

Document = dict[str, Any]


def render(folder: Path) -> list[Document]:
    """The objects that `kubectl apply -k` would send."""
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run(
        [kubectl, "kustomize", "--load-restrictor=LoadRestrictionsNone", str(folder)],
        env={"HOME": "/nonexistent", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # kustomize only warns of what it will not do any more.
    assert not done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@cache
def overlay(name: str) -> tuple[Document, ...]:
    return tuple(render(KUBERNETES / "overlays" / name))


def of_kind(objects: tuple[Document, ...] | list[Document], kind: str) -> list[Document]:
    return [found for found in objects if found["kind"] == kind]


def templates(objects: tuple[Document, ...] | list[Document]) -> Iterator[tuple[str, Document]]:
    """(kind, or the LeaderWorkerSet's half; pod template) of everything that makes pods."""
    for found in objects:
        spec = found.get("spec", {})
        if found["kind"] == "LeaderWorkerSet":
            for half in ("leaderTemplate", "workerTemplate"):
                yield half, spec["leaderWorkerTemplate"][half]
        elif "template" in spec:
            yield found["kind"], spec["template"]


def claims(objects: tuple[Document, ...] | list[Document]) -> dict[str, Document]:
    """Claims by name, of the one kind that has any."""
    for found in objects:
        spec = found.get("spec", {}).get("leaderWorkerTemplate", found.get("spec", {}))
        if "volumeClaimTemplates" in spec:
            return {claim["metadata"]["name"]: claim["spec"] for claim in spec["volumeClaimTemplates"]}
    return {}


def validate(found: Document, version: str) -> None:
    """Raises jsonschema's ValidationError. Fields that the schema does not know are errors too."""
    if found["kind"] not in RECORDED:
        kubernetes_validate.validate(found, version, strict=True)
        return
    schema = json.loads((ROOT / f"tests/packaging/schemas/{RECORDED[found['kind']]}.json").read_text())
    Draft202012Validator(schema, registry=_registry(version)).validate(found)


@cache
def _registry(version: str) -> Registry[Any]:
    definitions = schema_contents(f"kubernetes-json-schema/v{version}.0-local-strict/_definitions.json", version)
    return Resource.from_contents(definitions) @ Registry()


# -- what a container sees ----------------------------------------------------------------------------------


@cache
def image_environment() -> dict[str, str]:
    """ENV of every stage of the Dockerfile that the full image is made of."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    found: dict[str, str] = {}
    for line in re.findall(r"^ENV (.+)$", text, re.MULTILINE):
        found.update(word.split("=", 1) for word in shlex.split(line))
    return found


def compose_environment(service: str, shell: Mapping[str, str]) -> dict[str, str]:
    """The environment of a service of compose.yaml over the image's, with ``shell`` as the operator's."""
    document = compose_service(service)
    files = [ROOT / entry["path"] for entry in document.get("env_file", [])]
    lines = [line for path in files if path.is_file() for line in path.read_text().splitlines()]
    given: dict[str, str] = {}
    for entry in (*(line for line in lines if line.strip() and not line.startswith("#")), *document["environment"]):
        name, has_value, value = str(entry).partition("=")
        if has_value:
            given[name] = _interpolate(value, shell)
        elif name in shell:
            given[name] = shell[name]
    return {**image_environment(), **given}


def compose_service(service: str) -> Document:
    found: Document = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"][service]
    return found


def _interpolate(text: str, shell: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, operator, word = match.groups()
        if operator == ":+":
            return word if shell.get(name) else ""
        return shell.get(name) or (word if operator == ":-" else "")

    return re.sub(r"\$\{(\w+)(?:(:[-+])([^}]*))?\}", value, text)


def pod_environment(
    template: Document,
    objects: tuple[Document, ...] | list[Document],
    labels: Mapping[str, str] | None = None,
    injected: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of the pod's one container over the image's. ``injected`` comes first, as LeaderWorkerSet's
    variables do; ``$(NAME)`` sees only what stands before it."""
    (container,) = template["spec"]["containers"]
    maps = {found["metadata"]["name"]: found["data"] for found in of_kind(objects, "ConfigMap")}
    given: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        given.update(maps[source["configMapRef"]["name"]])
    given.update(injected or {})
    for entry in container["env"]:
        if "value" in entry:
            given[entry["name"]] = re.sub(r"\$\(([\w.-]+)\)", lambda m: given.get(m[1], m[0]), entry["value"])
        else:
            path = entry["valueFrom"]["fieldRef"]["fieldPath"]
            label = re.fullmatch(r"metadata\.labels\['([^']+)'\]", path)
            assert label, path
            given[entry["name"]] = {**template["metadata"]["labels"], **(labels or {})}[label[1]]
    return {**image_environment(), **given}
