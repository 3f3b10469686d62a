"""The container image of a pack, through the `docker` command."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from ..errors import Stop, config_rejected
from .contents import Item


@dataclass(frozen=True)
class StoredImage:
    """An image as the container engine has it. ``size`` in bytes, unpacked; an archive of it is hardly smaller."""

    name: str
    identity: str
    size: int

    @property
    def file(self) -> str:
        """Its archive in a pack: of another image it is another file."""
        return f"image-{self.identity.removeprefix('sha256:')[:12]}.tar"

    def item(self) -> Item:
        """Return the item that is its archive."""

        def write(partial: Path, _: Event) -> None:
            with partial.open("wb") as file:
                done = subprocess.run(["docker", "save", self.name], stdout=file, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                raise config_rejected(f"docker save {self.name}: {done.stderr.strip()}", "see docker images")

        return Item(self.file, None, write, named_by_content=True)


def find(name: str) -> StoredImage:
    """Return the image of that name. Raises Stop (78) without one, or without `docker`."""
    if shutil.which("docker") is None:
        raise config_rejected("--image needs the docker command, and there is none", "pack without --image")
    command = ["docker", "image", "inspect", "--format", "{{.Id}} {{.Size}}", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise config_rejected(
            f"no image {name}: {done.stderr.strip()}", f"build it: docker build -t {name} ., or name another one"
        )
    identity, size = done.stdout.split()
    return StoredImage(name, identity, int(size))


def load(archive: Path) -> str:
    """Give an archive to the container engine; return what it says, or why there is none to give it to. Raises Stop
    (69) when it refuses the archive."""
    if shutil.which("docker") is None or subprocess.run(["docker", "version"], capture_output=True).returncode:
        return f"the image stays where it is, since no docker answers here: docker load -i {archive}"
    done = subprocess.run(["docker", "load", "--quiet", "--input", str(archive)], capture_output=True, text=True)
    if done.returncode:
        raise Stop("image_mismatch", f"docker load -i {archive}: {done.stderr.strip()}", "look into the engine's log")
    return done.stdout.strip()
