"""A container engine and images for the tests of the doors. Everything lies under one directory and goes with it.

``DOORS_DIR`` keeps engine and images between runs by hand; without it they are made and removed.
"""

from __future__ import annotations

import os
import shutil
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
    if reason := docker_engine.obstacle(tuple(docker_engine.SYSTEM_PACKAGES.values())):
        pytest.skip(f"a container engine of its own: {reason}")
    kept = os.environ.get("DOORS_DIR")
    work = Path(kept) if kept else docker_engine.own_folder("relaunch-doors", docker_engine.stop)
    try:
        yield docker_engine.start(work)
    finally:
        if not kept:
            docker_engine.stop(work)


def build(docker: Docker, name: str, *options: str, context: Path = ROOT) -> Image:
    """The Dockerfile as written; the pinned base image is redirected by name to the stand-in."""
    began = time.monotonic()
    redirects = docker_engine.contexts(context / "Dockerfile")
    docker("build", *redirects, *options, "-t", name, str(context), timeout=1500)
    return Image(name, time.monotonic() - began)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the builder sees, held still: the working tree may change while the tests run."""
    return copy_sources(ROOT, tmp_path_factory.mktemp("sources") / "clone")


def copy_sources(source: Path, target: Path) -> Path:
    """As a fresh clone would lay it out: the same content, other file times."""
    target.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("entrypoint", "env", "locks", "scripts", "deploy"):
        shutil.copytree(source / folder, target / folder, ignore=ignore, copy_function=shutil.copy)
    for file in ("Dockerfile", ".dockerignore"):
        shutil.copy(source / file, target / file)
    return target


@pytest.fixture(scope="session")
def plain(docker: Docker, sources: Path) -> Image:
    options = ("--build-arg", "VARIANT=plain", "--build-arg", "REVISION=0123abc")
    return build(docker, "relaunch:plain", *options, context=sources)


@pytest.fixture(scope="session")
def engine(docker: Docker, sources: Path) -> Image:
    if docker("image", "inspect", "relaunch:local", check=False).returncode:
        free = shutil.disk_usage(docker.work).free
        if free < ENGINE_BYTES:
            pytest.skip(f"the image with the engine needs {ENGINE_BYTES >> 30} GiB of disk, {free >> 30} GiB are free")
    return build(docker, "relaunch:local", context=sources)
