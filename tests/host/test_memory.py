"""The memory that a process may use: machine, control groups of both versions, shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded import tree

from entrypoint.host import memory
from entrypoint.units import GIB


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "17179869184\n"}, 16 * GIB),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/a.slice/b\n",
                "sys/fs/cgroup/a.slice/memory.max": "100\n",
                "sys/fs/cgroup/a.slice/b/memory.max": "max\n",
            },
            100,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/docker/abc\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n",
            },
            GIB,
        ),
        (
            {"proc/self/cgroup": "5:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
            None,
        ),
        ({"sys/fs/cgroup/memory.max": "1073741824\n"}, None),  # of no group that /proc names
        (
            {
                "proc/self/cgroup": "1:name=systemd:/\n0::/system.slice/relaunch.service\n",
                "sys/fs/cgroup/system.slice/relaunch.service/memory.max": "max\n",
                "sys/fs/cgroup/system.slice/memory.max": "8589934592\n",
            },
            8 * GIB,
        ),
        ({}, None),
    ],
)
def test_the_cgroup_limit(tmp_path: Path, files: dict[str, str | bytes], limit: int | None) -> None:
    assert memory.cgroup_limit(tree(tmp_path, files)) == limit


def test_the_innermost_file_of_a_control_group_comes_first(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"proc/self/cgroup": "0::/a/b\n"}
    files |= {f"sys/fs/cgroup/{place}memory.events": "oom_kill 0\n" for place in ("", "a/", "a/b/")}
    found = memory.cgroup_files("memory.events", "memory.oom_control", tree(tmp_path, files))
    assert [str(file.parent.relative_to(tmp_path / "sys/fs/cgroup")) for file in found] == ["a/b", "a", "."]


def test_what_is_available_respects_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < memory.available_bytes() <= memory.total_bytes()
    monkeypatch.setattr(memory, "cgroup_limit", lambda: 4096)
    assert memory.available_bytes() == 4096


def test_a_host_without_shared_memory(tmp_path: Path) -> None:
    assert memory.shared_memory_bytes(tmp_path / "none") is None
    assert (memory.shared_memory_bytes(tmp_path) or 0) > 0
