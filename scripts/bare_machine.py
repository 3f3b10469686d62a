"""Try the README on bare Debian machines: `scripts/bare_machine.py [bookworm] [trixie]`, as root, with mmdebstrap.

For each suite a root directory is made with what the README asks for and no more, in namespaces of its own (mounts,
processes, IPC, host name; the network is this host's, for the downloads). An ordinary user with an empty home clones
this commit there and runs the README's own commands: serve, wait, ask, kill, heal, Ctrl-C; with ``--tests`` also
`./relaunch test`, with ``--only-tests`` nothing else, without the engine. Nothing may be left in /tmp, in /dev/shm or
among the processes. All of it is removed at the end, about 12 GB a suite with the engine. How this host reaches its
package indexes is carried along. Ends with 0 when all held.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUITES = ("bookworm", "trixie")
# As the README says: Python with venv, and git, curl, procps; certificates for the downloads.
PACKAGES = "python3,python3-venv,git,curl,procps,ca-certificates"
USER, UID = "newcomer", 1000
PLACE, PREFIX = Path("/var/tmp"), "relaunch-bare-"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
# What says how this host reaches its package indexes; where caches and interpreters lie is not part of that.
INDEX = re.compile(r"(PIP|UV)_\w+|\w*(SSL_CERT|CA_BUNDLE|CAINFO)\w*|\w+_proxy", re.IGNORECASE)
NOT_INDEX = re.compile(r"\w*(CACHE|PYTHON|TARGET|PREFIX|USER|CONSTRAINT|REQUIRE)\w*")
PIP_FILES = ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")
UV_FILES = ("/etc/uv/uv.toml", "~/.config/uv/uv.toml")
NODES = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}
# Runs inside the new namespaces, before the change of root. $1: the root directory; then folders to show, read-only.
SETUP = """set -eu
root=$1; shift
mount --make-rprivate /
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir -m 1777 "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
while [ "$1" != -- ]; do
    if [ "${1#*:}" != "$1" ]; then mknod -m 666 "$root/dev/${1%:*}" c 1 "${1#*:}"
    else mkdir -p "$root$1"; mount --bind -o ro "$1" "$root$1"; fi
    shift
done
shift
ln -s /proc/self/fd "$root/dev/fd"
hostname bare
exec /usr/sbin/chroot "$root" setpriv --reuid=1000 --regid=1000 --clear-groups --inh-caps=-all --no-new-privs "$@"
"""


class Failed(Exception):
    """What did not hold, in one line."""


def main() -> int:
    """The script. Returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"default: {' '.join(SUITES)}")
    parser.add_argument("--tests", action="store_true", help="run ./relaunch test there too")
    parser.add_argument("--only-tests", action="store_true", help="run nothing but ./relaunch test there")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return inside(not arguments.only_tests, arguments.tests or arguments.only_tests)
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        parser.exit(69, "scripts/bare_machine.py needs root and mmdebstrap\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    code = 0
    for suite in arguments.suites or SUITES:
        say(f"== Debian {suite}")
        with machine(suite) as (root, shown):
            code = enter(root, shown, [word for word in ("--tests", "--only-tests") if word in sys.argv]) or code
        say(f"== Debian {suite}: {'all held' if code == 0 else 'did NOT hold'}")
    return code


def say(text: str) -> None:
    print(text, flush=True)


# -- outside ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def machine(suite: str) -> Iterator[tuple[Path, list[str]]]:
    """(root directory of a bare machine with a clone in it, folders to show there); removed afterwards."""
    sweep(PLACE)
    work = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PLACE))
    try:
        with open(work / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            root = work / "root"
            site = output("apt-get", "indextargets", "--format", "$(SITE)").split()[:1]
            output("mmdebstrap", "-q", "--variant=minbase", f"--include={PACKAGES}", suite, str(root), *site)
            output("chroot", str(root), "useradd", "--create-home", "--uid", str(UID), USER)
            shown = carry_indexes(root)
            clone = root / f"home/{USER}/relaunch"
            output("git", "clone", "-q", "--no-hardlinks", f"file://{ROOT}", str(clone))
            output("chown", "-R", f"{UID}:{UID}", str(clone))
            if output("git", "-C", str(ROOT), "status", "--porcelain"):
                say("note: changes that are not committed are not part of the clone")
            yield root, shown
    finally:
        remove(work)


def sweep(place: Path) -> None:
    """Remove what earlier runs were cut off from removing. Those that run hold their lock."""
    for left in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), open(left / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(left)


def remove(work: Path) -> None:
    """Mounts lie in the namespace that has ended: a mount that is left must not be emptied."""
    mounted = [line for line in Path("/proc/self/mounts").read_text().splitlines() if f" {work}/" in line]
    if mounted:
        raise RuntimeError(f"still mounted: {mounted[0]}")
    shutil.rmtree(work)


def output(*command: str) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def carry_indexes(root: Path) -> list[str]:
    """Certificates, resolver, and the configuration of pip and uv. Returns folders of this host that they name."""
    bundle = os.environ.get("SSL_CERT_FILE", CERTIFICATES)
    for source, target in ((bundle, CERTIFICATES), ("/etc/resolv.conf",) * 2, ("/etc/hosts",) * 2):
        if os.path.exists(source):
            shutil.copyfile(source, f"{root}{target}")
    shown: list[str] = []
    for tool, files in (("pip", PIP_FILES), ("uv", UV_FILES)):
        texts = [path.read_text() for path in map(Path, map(os.path.expanduser, files)) if path.is_file()]
        for text in texts:
            found = re.findall(r"(?:file://|(?<=[\s=\"']))(/[^\s\"',]+)", text)
            shown += [path for path in found if os.path.isdir(path)]
        if texts:
            # Later files win in both tools, as later lines do not: one file each, the last one's lines last.
            (root / "etc" / tool).mkdir(exist_ok=True)
            target = root / ("etc/pip.conf" if tool == "pip" else "etc/uv/uv.toml")
            target.write_text(merged(texts) if tool == "pip" else texts[-1])
    shown += [value for name, value in indexes().items() if os.path.isdir(value)]
    outermost = [path for path in dict.fromkeys(shown) if not any(path.startswith(f"{other}/") for other in shown)]
    return [path for path in outermost if not os.path.isdir(f"{root}{path}")]


def merged(texts: list[str]) -> str:
    """Configurations of pip as one: a later file's value takes the place of an earlier one's."""
    import configparser
    import io

    parser = configparser.RawConfigParser()
    for text in texts:
        parser.read_string(text)
    shown = io.StringIO()
    parser.write(shown)
    return shown.getvalue()


def indexes() -> dict[str, str]:
    """The environment's part of it."""
    return {name: value for name, value in os.environ.items() if INDEX.fullmatch(name) and not NOT_INDEX.search(name)}


def enter(root: Path, shown: list[str], options: list[str]) -> int:
    """Run this script's inner part there; its exit code. All processes in there end with it."""
    ports = free_ports()
    environ = {
        **indexes(),
        "HOME": f"/home/{USER}",
        "USER": USER,
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        **ports,
    }
    nodes = [f"{name}:{minor}" for name, minor in NODES.items()]
    command = ["unshare", "--mount", "--pid", "--fork", "--ipc", "--uts", "--kill-child"]
    command += ["sh", "-c", SETUP, "sh", str(root), *shown, *nodes, "--"]
    command += ["python3", "-B", "-u", f"/home/{USER}/relaunch/scripts/bare_machine.py", "--inside", *options]
    return subprocess.run(command, env=environ, stdin=subprocess.DEVNULL).returncode


def free_ports() -> dict[str, str]:
    """Nothing where the README's ports are free on this host, else two others as settings."""
    found = {}
    for name, wanted in (("RELAUNCH_PORT", 30000), ("RELAUNCH_CONTROL_PORT", 30001)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", wanted))
            except OSError:
                probe.bind(("127.0.0.1", 0))
                found[name] = str(probe.getsockname()[1])
    return found


# -- inside, as the ordinary user ---------------------------------------------------------------------------


def inside(serves: bool, tests: bool) -> int:
    """The README's commands, each with what it must do, and the tests, as far as wanted. Returns the exit code."""
    began = time.monotonic()

    def step(text: str) -> None:
        say(f"{time.monotonic() - began:7.1f} s  {text}")

    os.chdir(Path.home() / "relaunch")
    step(f"Python {sys.version.split()[0]}, uid {os.getuid()}, home {sorted(os.listdir(Path.home()))}")
    log = Path.home() / "serve.log"
    try:
        if serves:
            serve_and_heal(step, log)
        if tests:
            step("$ ./relaunch test")
            if code := subprocess.run(["./relaunch", "test"]).returncode:
                raise Failed(f"./relaunch test ended with {code}")
            nothing_left(step, ("pytest-of-",))
        step("disk: " + subprocess.run(["du", "-sh", Path.home()], capture_output=True, text=True).stdout.split()[0])
    except Failed as failed:
        step(f"FAILED: {failed}")
        say(log.read_text()[-6000:] if log.exists() else "")
        return 1
    return 0


def serve_and_heal(step, log: Path) -> None:  # type: ignore[no-untyped-def]
    """The README's own commands. Raises Failed."""
    serve, wait, ask, kill = readme(Path("README.md").read_text())
    step(f"$ {serve}")
    with open(log, "w") as file:
        server = subprocess.Popen(serve.split(), stdout=file, stderr=subprocess.STDOUT)
    answers(step, wait, ask)
    step(f"$ {kill}")
    subprocess.run(shlex.split(kill), check=True)  # a shell's own command line would match too
    until(lambda: not ready(), 30, "the kill was not noticed")
    step("not ready: the kill was noticed")
    answers(step, wait, ask)
    step("$ ./relaunch history")
    subprocess.run(["./relaunch", "history"])
    stopped = time.monotonic()
    server.send_signal(signal.SIGINT)
    code = server.wait(120)
    step(f"Ctrl-C: exit code {code} after {time.monotonic() - stopped:.1f} s")
    if code:
        raise Failed(f"serve ended with {code}")
    lines = log.read_text().splitlines(keepends=True)
    say("".join(line for line in lines if " relaunch " in line or "crashed with" in line))
    nothing_left(step, ())


def readme(text: str) -> tuple[str, str, str, str]:
    """The commands of the README that serve, wait, ask and kill."""
    part = text[text.index("## Try it on a laptop") :]
    blocks = re.findall(r"^```sh\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    lines = [line.partition("#")[0].strip() for line in blocks[0].splitlines()]
    kill = re.search(r"`(pkill [^`]+)`", part)
    if len(lines) != 2 or "/v1/embeddings" not in blocks[1] or kill is None:
        raise Failed("the README has other commands than this script knows")
    ask = blocks[1].replace(":30000", f":{os.environ.get('RELAUNCH_PORT', 30000)}")
    return lines[0], lines[1], ask, kill[1]


def answers(step, wait: str, ask: str) -> None:  # type: ignore[no-untyped-def]
    """Wait, then ask; the answer must be a vector of the model's size."""
    step(f"$ {wait}")
    if code := subprocess.run(wait.split()).returncode:
        raise Failed(f"{wait} ended with {code}")
    answer = subprocess.run(ask, shell=True, capture_output=True, text=True)
    vector = json.loads(answer.stdout)["data"][0]["embedding"] if answer.returncode == 0 else []
    if len(vector) != 384:
        raise Failed(f"no answer: {answer.returncode} {answer.stdout[:300]} {answer.stderr[:300]}")
    step(f"ready, and answers with {len(vector)} numbers: {', '.join(f'{x:.6f}' for x in vector[:3])}, ...")


def ready() -> bool:
    """What the control port says."""
    port = os.environ.get("RELAUNCH_CONTROL_PORT", "30001")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False


def until(true, seconds: float, otherwise: str) -> None:  # type: ignore[no-untyped-def]
    """Poll. Raises Failed when it never becomes true."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise Failed(otherwise)
        time.sleep(0.05)


def nothing_left(step, allowed: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    """No process but this one, nothing in /tmp and /dev/shm. Raises Failed."""
    own = {1, os.getpid()}
    processes = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdecimal() and int(pid) not in own]
    named = [path.read_bytes().replace(b"\0", b" ").decode() for path in processes if path.exists()]
    named = [name for name in named if name]  # the others are dead, and pid 1 here has not asked for them
    files = [f"{place}/{name}" for place in ("/tmp", "/dev/shm") for name in os.listdir(place)]
    files = [file for file in files if not file.rpartition("/")[2].startswith(allowed or ("\0",))]
    if named or files:
        raise Failed(f"left behind: processes {named}, files {files}")
    step("nothing left among the processes, in /tmp and in /dev/shm")


if __name__ == "__main__":
    sys.exit(main())
