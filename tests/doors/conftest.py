"""A container engine and images for the tests of the doors. Everything lies under one directory and goes with it.

``DOORS_DIR`` keeps engine and images between runs by hand; without it they are made and removed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker_engine
import pytest
from docker_engine import ROOT, Docker

# The image with the engine takes 11 GB, and as much again while its layer is written.
ENGINE_BYTES = 24 << 30


@dataclass(frozen=True)
class Image:
    """A built image: its name and the seconds that the build took."""

    name: str
    seconds: float


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    kept = os.environ.get("DOORS_DIR")
    work = Path(kept) if kept else Path(tempfile.mkdtemp(prefix="relaunch-doors-", dir="/var/tmp"))
    running = docker_engine.start(work)
    yield running
    if not kept:
        docker_engine.stop(work)


def build(docker: Docker, name: str, *options: str, context: Path = ROOT) -> Image:
    """The Dockerfile as written; the pinned base image is redirected by name to the stand-in."""
    began = time.monotonic()
    redirects = docker_engine.contexts(context / "Dockerfile")
    docker("build", *redirects, *options, "-t", name, str(context), timeout=1500)
    return Image(name, time.monotonic() - began)


@pytest.fixture(scope="session")
def plain(docker: Docker) -> Image:
    return build(docker, "relaunch:plain", "--build-arg", "VARIANT=plain", "--build-arg", "REVISION=0123abc")


@pytest.fixture(scope="session")
def engine(docker: Docker) -> Image:
    if docker("image", "inspect", "relaunch:local", check=False).returncode:
        free = shutil.disk_usage(docker.work).free
        if free < ENGINE_BYTES:
            pytest.skip(f"the image with the engine needs {ENGINE_BYTES >> 30} GiB of disk, {free >> 30} GiB are free")
    return build(docker, "relaunch:local")
