"""A Docker engine of its own for the tests: Debian 13's engine, compose and buildx unpacked beside the system,
started under one directory and gone with it. Nothing of a registry is needed: the pinned base image is
redirected by name to a stand-in that is made here from Debian's packages and this machine's CPython 3.12.

By hand: ``python tests/packaging/docker_engine.py up DIR`` prints the environment to use, ``down DIR`` ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

SYSTEM_PACKAGES = {"containerd": "containerd", "runc": "runc", "iptables": "iptables", "mmdebstrap": "mmdebstrap"}
DEBS = ("docker.io", "docker-cli", "docker-compose", "docker-buildx")
STAND_IN = "localhost/base:stand-in"
# Started by this process, and so its own to wait for.
_DAEMONS: list[subprocess.Popen[bytes]] = []


class EngineError(RuntimeError):
    """What could not be set up, with the end of the tool's own words."""


@dataclass(frozen=True)
class Docker:
    """A running engine. ``work`` holds everything; ``env`` is what its clients need."""

    work: Path
    env: Mapping[str, str]

    def __call__(
        self,
        *words: str,
        check: bool = True,
        cwd: Path = ROOT,
        timeout: float = 120.0,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """``docker WORDS`` with its output as text. Raises EngineError on a non-zero exit unless ``check`` is off."""
        return run(["docker", *words], {**self.env, **(env or {})}, check=check, cwd=cwd, timeout=timeout)

    def oci(self, hostname: str) -> dict[str, object]:
        """The OCI configuration that was asked of the runtime for the container of that host name."""
        document: dict[str, object] = json.loads((self.work / "oci" / f"{hostname}.json").read_text())
        return document


def run(
    command: Sequence[str], env: Mapping[str, str], *, check: bool = True, cwd: Path = ROOT, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        list(command), env=dict(env), cwd=cwd, text=True, timeout=timeout, stdin=subprocess.DEVNULL, capture_output=True
    )
    if check and done.returncode:
        raise EngineError(f"{' '.join(command)} exited {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done


def may_install() -> bool:
    """May packages be installed on this machine? A CI system says so of itself; a person's machine is left alone."""
    return bool(os.environ.get("CI"))


def obstacle(tools: Sequence[str]) -> str | None:
    """Why root directories and containers cannot be made here, for a skip; None where they can, and under CI, where
    a failure is to be seen. ``tools``: programs that are needed."""
    if may_install():
        return None
    if os.geteuid() != 0:
        return "needs root"
    absent = [tool for tool in tools if shutil.which(tool, path=_system_path()) is None]
    if absent:
        return f"{', '.join(absent)} not installed here, and nothing is installed unasked (CI=true asks)"
    try:
        python312()
    except EngineError as error:
        return str(error)
    return None


def own_folder(kind: str, remove: Callable[[Path], None], place: Path = Path("/var/tmp")) -> Path:
    """A new folder that carries the number of this process; ``remove`` is called for those that killed runs left."""
    for left in place.glob(f"{kind}-*-*"):
        owner = left.name.removeprefix(f"{kind}-").partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            remove(left)
    return Path(tempfile.mkdtemp(prefix=f"{kind}-{os.getpid()}-", dir=place))


def start(work: Path) -> Docker:
    """Everything from nothing to an answering engine with the stand-in base image."""
    work.mkdir(parents=True, exist_ok=True)
    missing = [package for package, tool in SYSTEM_PACKAGES.items() if shutil.which(tool, path=_system_path()) is None]
    if missing:
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run(["apt-get", "update", "-qq"], quiet, timeout=300)
        run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], quiet, timeout=300)
    _unpack(work)
    docker = Docker(work, _environment(work))
    _dockerd(docker)
    try:
        if docker("image", "inspect", STAND_IN, check=False).returncode:
            _stand_in(docker)
    except BaseException:
        stop(work)
        raise
    return docker


def stop(work: Path) -> None:
    """End this engine and its containers, by their own ids, and remove its directory."""
    env = _environment(work)
    if (work / "docker.pid").exists():
        docker = Docker(work, env)
        ids = docker("ps", "-aq", check=False).stdout.split()
        if ids:
            docker("rm", "-f", *ids, check=False)
        _end(int((work / "docker.pid").read_text()))
    subprocess.run(["umount", str(work / "exec/netns/default")], stderr=subprocess.DEVNULL, check=False)
    shutil.rmtree(work, ignore_errors=True)


def _end(pid: int) -> None:
    """SIGTERM, and wait until it is gone: its directory is removed next."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    ours = next((daemon for daemon in _DAEMONS if daemon.pid == pid), None)
    if ours is not None:
        ours.wait(60)
        return
    for _ in range(300):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.2)


def _system_path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def _environment(work: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RELAUNCH_", "COMPOSE_", "DOCKER_"))}
    tools = work / "root"
    return {
        **kept,
        "PATH": f"{work}/stub:{tools}/usr/bin:{tools}/usr/sbin:{_system_path()}",
        "DOCKER_CONFIG": str(work / "config"),
        "DOCKER_HOST": f"unix://{work}/docker.sock",
        "RUNC_CI_LOG": str(work / "oci"),
        "BUILDKIT_PROGRESS": "plain",
    }


def _mirror() -> str:
    """This machine's own Debian mirror."""
    sites = run(["apt-get", "indextargets", "--format", "$(SITE)"], os.environ).stdout.split()
    if not sites:
        raise RuntimeError("apt knows no Debian archive here: the doors' tests unpack their tools from one")
    return sites[0]


def _unpack(work: Path) -> None:
    if (work / "root/usr/sbin/dockerd").exists():
        return
    apt = work / "apt"
    for folder in (apt / "lists/partial", apt / "cache/archives/partial", work / "debs"):
        folder.mkdir(parents=True, exist_ok=True)
    (apt / "sources.list").write_text(
        f"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {_mirror()} trixie main\n"
    )
    options = [
        f"Dir::Etc::SourceList={apt}/sources.list",
        "Dir::Etc::SourceParts=/dev/null",
        f"Dir::State::Lists={apt}/lists",
        f"Dir::Cache={apt}/cache",
        "APT::Sandbox::User=root",
    ]
    flags = [word for option in options for word in ("-o", option)]
    run(["apt-get", *flags, "update", "-qq"], os.environ, timeout=300)
    run(["apt-get", *flags, "download", "-qq", *DEBS], os.environ, cwd=work / "debs", timeout=300)
    for deb in sorted((work / "debs").glob("*.deb")):
        run(["dpkg-deb", "-x", str(deb), str(work / "root")], os.environ)
    plugins = work / "config/cli-plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    for plugin in (work / "root/usr/libexec/docker/cli-plugins").iterdir():
        (plugins / plugin.name).symlink_to(plugin)
    # With a hook of this name on its PATH the engine accepts a GPU reservation; this one does nothing.
    hook = work / "stub/nvidia-container-runtime-hook"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ncat > /dev/null\nexit 0\n")
    hook.chmod(0o755)


def _dockerd(docker: Docker) -> None:
    work = docker.work
    (work / "oci").mkdir(exist_ok=True)
    if docker("info", check=False).returncode == 0:
        return
    with (work / "dockerd.log").open("ab") as log:
        daemon = subprocess.Popen(
            [
                "dockerd",
                "--data-root",
                str(work / "data"),
                "--exec-root",
                str(work / "exec"),
                "-H",
                docker.env["DOCKER_HOST"],
                "-p",
                str(work / "docker.pid"),
                "--add-runtime",
                f"ci={HERE / 'runc_ci'}",
                "--default-runtime",
                "ci",
            ],
            env=dict(docker.env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _DAEMONS.append(daemon)
    for _ in range(120):
        if docker("info", check=False).returncode == 0:
            return
        if daemon.poll() is not None:
            break
        time.sleep(0.25)
    raise EngineError("dockerd did not start:\n" + (work / "dockerd.log").read_text()[-3000:])


def python312() -> Path:
    """Prefix of a CPython 3.12 of this machine."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [*sorted(home.glob("versions/3.12.*"), reverse=True), Path("/usr/local"), Path("/usr")]
    for prefix in candidates:
        if (prefix / "bin/python3.12").exists() and (prefix / "lib/python3.12/ensurepip").exists():
            return prefix
    raise EngineError("no CPython 3.12 here to stand in for the pinned base image's: set PYENV_ROOT")


def _stand_in(docker: Docker) -> None:
    """Debian 13 with this machine's CPython 3.12 and certificates, as python:3.12-slim is built."""
    python = python312()
    certificates = Path("/usr/local/share/ca-certificates")
    hooks = [f"--customize-hook=copy-in {certificates} /usr/local/share"] if any(certificates.glob("*.crt")) else []
    hooks.append('--customize-hook=chroot "$1" update-ca-certificates > /dev/null')
    hooks.append(f'--customize-hook=cp -a {python}/. "$1/usr/local/" && chroot "$1" ldconfig')
    hooks.append(
        '--customize-hook=find "$1/usr/local/lib/python3.12/site-packages" -mindepth 1 -maxdepth 1 ! -name "pip*" '
        '-exec rm -rf {} + ; rm -rf "$1/usr/local/lib/python3.12/test"'
    )
    with tempfile.TemporaryDirectory(dir=docker.work) as folder:
        tar = Path(folder) / "base.tar"
        run(
            [
                "mmdebstrap",
                "-q",
                "--variant=minbase",
                "--include=ca-certificates,libssl3t64,libffi8,libsqlite3-0,libreadline8t64,libbz2-1.0,liblzma5,zlib1g",
                *hooks,
                "trixie",
                str(tar),
                _mirror(),
            ],
            docker.env,
            timeout=300,
        )
        docker("import", "-c", "ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt", str(tar), STAND_IN)


def contexts(dockerfile: Path) -> list[str]:
    """``--build-context`` options that redirect every pinned FROM of the file, by its written name."""
    names = sorted(set(re.findall(r"^FROM +(\S+@sha256:[0-9a-f]{64})", dockerfile.read_text(), re.M)))
    if not names:
        raise EngineError(f"{dockerfile} pins no base image")
    return [word for name in names for word in ("--build-context", f"{name}=docker-image://{STAND_IN}")]


if __name__ == "__main__":
    verb, where = sys.argv[1], Path(sys.argv[2])
    if verb == "up":
        running = start(where)
        for key in ("PATH", "DOCKER_CONFIG", "DOCKER_HOST", "RUNC_CI_LOG", "BUILDKIT_PROGRESS"):
            print(f"export {key}={running.env[key]}")
    elif verb == "down":
        stop(where)
    else:
        sys.exit("usage: docker_engine.py up|down DIR")
