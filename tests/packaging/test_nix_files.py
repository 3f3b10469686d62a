"""The pieces of the Nix door that need no Nix: the options, the launcher, the search for programs, the lock."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "/run/opengl-driver/lib /usr/lib/wsl/lib /usr/local/nvidia/lib64 /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/lib"
)


def module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_of_nix", ROOT / path)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_options_are_the_settings() -> None:
    assert (ROOT / "nix/settings.json").read_text() == module("scripts/nix_settings.py").render(), (
        "stale: run scripts/nix_settings.py"
    )


def test_the_flake_has_one_input_and_the_lock_pins_it() -> None:
    lock = json.loads((ROOT / "flake.lock").read_text())
    assert lock["nodes"]["root"]["inputs"] == {"nixpkgs": "nixpkgs"} and set(lock["nodes"]) == {"root", "nixpkgs"}
    original, locked = lock["nodes"]["nixpkgs"]["original"], lock["nodes"]["nixpkgs"]["locked"]
    url = re.search(r'inputs\.nixpkgs\.url = "github:(\w+)/(\w+)/([\w.-]+)";', (ROOT / "flake.nix").read_text())
    assert url and url.groups() == (original["owner"], original["repo"], original["ref"])
    assert re.fullmatch(r"[0-9a-f]{40}", locked["rev"]) and locked["narHash"].startswith("sha256-")


def test_no_address_but_the_input() -> None:
    for path in [ROOT / "flake.nix", *(path for path in (ROOT / "nix").iterdir() if path.is_file())]:
        assert "://" not in path.read_text(), path


def test_the_unit_does_not_restart_what_no_restart_can_cure() -> None:
    codes = re.search(r"RestartPreventExitStatus=([\d ]+)", (ROOT / "docs/operations.md").read_text())
    assert codes
    assert f'RestartPreventExitStatus = "{codes[1]}"' in (ROOT / "nix/module.nix").read_text()


# -- the launcher -------------------------------------------------------------------------------------------


class Host:
    """A host with the launcher filled in as nix/package.nix does, and folders of drivers under ``tmp_path``."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path
        show = tmp_path / "python"
        code = "import os, json; print(json.dumps(dict(os.environ)))"
        show.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS -c "{code}"\n')
        show.chmod(0o755)
        text = (ROOT / "nix/launch.sh").read_text()
        assert FOLDERS in text
        filled = {
            "shell": "/bin/sh",
            "app": "/app",
            "python": str(show),
            "path": "/closure/bin",
            "libraries": "/closure/lib",
            "cuda": "/closure/cuda",
        }
        for name, value in filled.items():
            text = text.replace(f"@{name}@", value)
        for folder in FOLDERS.split():
            text = re.sub(rf"(?<![\w/]){folder}(?=[ ;)\n])", f"{tmp_path}{folder}", text)
        self.launcher = tmp_path / "relaunch"
        self.launcher.write_text(text)

    def driver(self, folder: str, *files: str) -> str:
        place = Path(f"{self.root}{folder}")
        place.mkdir(parents=True, exist_ok=True)
        for file in files:
            (place / file).touch()
        return str(place)

    def start(self, **environ: str) -> dict[str, str]:
        base = {"PATH": os.environ["PATH"], "HOME": str(self.root / "home")}
        command, env = ["sh", str(self.launcher), "plan"], {**base, **environ}
        seen: dict[str, str] = json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout)
        return seen


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_host_without_a_driver_gets_the_closure_alone(host: Host) -> None:
    seen = host.start()
    assert seen["LD_LIBRARY_PATH"] == "/closure/lib" and "TRITON_LIBCUDA_PATH" not in seen
    assert seen["CUDA_HOME"] == "/closure/cuda" and seen["PATH"].startswith("/closure/bin:")


def test_nixos_keeps_the_driver_in_its_own_folder(host: Host) -> None:
    driver = host.driver("/run/opengl-driver/lib", "libcuda.so.1")
    host.driver("/usr/lib64", "libcuda.so.1")
    seen = host.start()
    assert seen["LD_LIBRARY_PATH"] == f"/closure/lib:{driver}" and seen["TRITON_LIBCUDA_PATH"] == driver


@pytest.mark.parametrize("folder", ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"])
def test_elsewhere_the_driver_comes_without_the_distribution(host: Host, folder: str) -> None:
    files = (
        "libcuda.so.1",
        "libcuda.so.580.95.05",
        "libnvidia-ml.so.1",
        "libnvidia-ptxjitcompiler.so.1",
        "libc.so.6",
        "libstdc++.so.6",
    )
    driver = host.driver(folder, *files)
    seen = host.start()
    links = Path(seen["LD_LIBRARY_PATH"].removeprefix("/closure/lib:"))
    assert links == host.root / "home/.cache/relaunch/driver"
    assert sorted(path.name for path in links.iterdir()) == sorted(files[:4])
    assert os.readlink(links / "libcuda.so.1") == f"{driver}/libcuda.so.1"
    assert host.start() == seen, "a second start finds the links and stays as it is"


def test_a_cache_that_cannot_be_written_is_said_and_does_not_stop_the_start(host: Host) -> None:
    host.driver("/usr/lib64", "libcuda.so.1")
    (host.root / "file").touch()
    assert host.start(RELAUNCH_CACHE_DIR=str(host.root / "file"))["LD_LIBRARY_PATH"] == "/closure/lib"


def test_what_the_operator_has_set_stays(host: Host) -> None:
    driver = host.driver("/run/opengl-driver/lib", "libcuda.so.1")
    seen = host.start(LD_LIBRARY_PATH="/mine", CUDA_HOME="/cuda", TRITON_LIBCUDA_PATH="/t", PYTHONPATH="/other")
    assert seen["LD_LIBRARY_PATH"] == f"/closure/lib:{driver}:/mine"
    assert (seen["CUDA_HOME"], seen["TRITON_LIBCUDA_PATH"], seen["PYTHONPATH"]) == ("/cuda", "/t", "/app")


# -- programs of wheels -------------------------------------------------------------------------------------


def elf(path: Path, kinds: list[int], mode: int = 0o755) -> Path:
    """A 64-bit ELF file with nothing but program headers of those kinds."""
    head = bytearray(64)
    head[:5] = b"\x7fELF\x02"
    head[32:40] = (64).to_bytes(8, "little")
    head[54:58] = (56).to_bytes(2, "little") + len(kinds).to_bytes(2, "little")
    path.write_bytes(bytes(head) + b"".join(kind.to_bytes(4, "little") + bytes(52) for kind in kinds))
    path.chmod(mode)
    return path


def test_programs_are_found_and_nothing_else(tmp_path: Path) -> None:
    find = module("nix/interpreters.py")
    program = elf(tmp_path / "nvcc", [6, 3, 1])
    elf(tmp_path / "libtorch.so", [1, 2])
    elf(tmp_path / "not-executable", [3], 0o644)
    (tmp_path / "link").symlink_to(program)
    (tmp_path / "script").write_text("#!/bin/sh\n" + "x" * 80)
    (tmp_path / "script").chmod(0o755)
    (tmp_path / "short").write_bytes(b"\x7fELF")
    (tmp_path / "short").chmod(0o755)
    assert list(find.programs(tmp_path)) == [program]
    assert program.stat().st_mode & stat.S_IXUSR
