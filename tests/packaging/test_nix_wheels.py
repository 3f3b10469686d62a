"""locks/wheels.json, which the flake installs from, says what the locks say. Offline."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.utils import canonicalize_name, parse_wheel_filename

from entrypoint.pack import wheels

ROOT = Path(__file__).resolve().parents[2]
# What markers of the locks may ask, as the flake's interpreter would answer.
TARGET = {
    "implementation_name": "cpython",
    "implementation_version": "3.12.0",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_release": "",
    "platform_system": "Linux",
    "platform_version": "",
    "python_full_version": "3.12.0",
    "python_version": "3.12",
    "sys_platform": "linux",
    "extra": "",
}


PYTHON = (3, 12)
ROWS = json.loads((ROOT / "locks/wheels.json").read_text())


def locked(name: str) -> dict[str, tuple[str, set[str]]]:
    """Version and digests by package, for CPython 3.12 on x86_64 Linux."""
    text = (ROOT / f"locks/{name}.txt").read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        head = re.match(r"([A-Za-z0-9._-]+)==(\S+) *(?:; *(.*?))?(?= --hash|$)", line)
        if head and (not head[3] or Marker(head[3]).evaluate(TARGET)):
            found[canonicalize_name(head[1])] = (head[2], set(re.findall(r"--hash=sha256:([0-9a-f]{64})", line)))
    return found


@pytest.mark.parametrize("lock", ["runtime", "engine", "gateway", "dev"])
def test_every_locked_package_has_the_wheel_of_its_lock(lock: str) -> None:
    rows = {row["name"]: row for row in ROWS}
    packages = locked(lock)
    assert len(packages) > 25
    for name, (version, digests) in packages.items():
        assert rows[name]["version"] == version
        assert rows[name]["sha256"] in digests, f"{name}: not a digest of locks/{lock}.txt"


def test_nothing_else_is_in_it() -> None:
    names = [row["name"] for row in ROWS]
    assert names == sorted(set(names))
    assert set(names) == set(locked("engine")) | set(locked("gateway")) | set(locked("dev"))
    assert all(set(row) == {"name", "version", "file", "sha256"} for row in ROWS)


def test_the_gateway_goes_beside_the_engine_and_changes_none_of_its_packages() -> None:
    engine, gateway, runtime = (locked(name) for name in ("engine", "gateway", "runtime"))
    assert set(gateway) - set(engine) == {"smg"}
    assert set(runtime) < set(gateway)
    assert all(engine[name] == row for name, row in gateway.items() if name in engine)


def test_file_names_are_wheels_of_that_package_for_this_interpreter() -> None:
    for row in ROWS:
        name, version, _, _ = parse_wheel_filename(row["file"])
        assert (name, str(version)) == (row["name"], row["version"])
        assert wheels.rank(row["file"], PYTHON) is not None, f"{row['file']} does not run on CPython 3.12"


def test_no_address_is_in_it() -> None:
    assert "/" not in (ROOT / "locks/wheels.json").read_text()
    assert "http" not in (ROOT / "scripts/wheels.py").read_text()


@pytest.mark.parametrize(
    ("files", "best"),
    [
        (
            ["a-1-py3-none-any.whl", "a-1-cp312-cp312-manylinux_2_17_x86_64.whl"],
            "a-1-cp312-cp312-manylinux_2_17_x86_64.whl",
        ),
        (
            ["a-1-cp313-cp313-manylinux_2_17_x86_64.whl", "a-1-cp39-abi3-manylinux2014_x86_64.whl"],
            "a-1-cp39-abi3-manylinux2014_x86_64.whl",
        ),
        (
            ["a-1-cp312-cp312-manylinux_2_39_x86_64.whl", "a-1-cp312-cp312-manylinux_2_28_x86_64.whl"],
            "a-1-cp312-cp312-manylinux_2_28_x86_64.whl",
        ),
        (["a-1-cp312-cp312-musllinux_1_2_x86_64.whl", "a-1-py3-none-any.whl"], "a-1-py3-none-any.whl"),
    ],
)
def test_the_best_wheel_is_chosen(files: list[str], best: str) -> None:
    assert wheels.choose(files, PYTHON) == best
    assert wheels.choose(files[::-1], PYTHON) == best


def test_a_package_without_a_fitting_wheel_is_an_error() -> None:
    with pytest.raises(ValueError, match="no wheel"):
        wheels.choose(["a-1-cp312-cp312-win_amd64.whl", "a-1-cp312-cp312-manylinux_2_17_aarch64.whl"], PYTHON)
