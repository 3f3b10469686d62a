"""Which file system lies below a path, and which of them are a network's."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.host import mounts

RECORDED = Path(__file__).parents[1] / "data" / "host" / "mountinfo"
STACKED = """\
22 1 0:20 / / rw - overlay overlay rw,lowerdir=/l
30 22 0:30 / /data rw shared:1 - ext4 /dev/sda1 rw
31 30 0:31 / /data/my\\040models rw - nfs4 server:/models rw,vers=4.2
32 22 0:32 / /database rw - xfs /dev/sdb1 rw
33 22 0:33 / /database rw - zfs pool rw
a line that is none
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/x", "overlay"),
        ("/data", "ext4"),
        ("/data/x", "ext4"),
        ("/data/my models/x", "nfs4"),
        ("/database", "zfs"),  # mounted over the xfs
        ("/databases", "overlay"),
    ],
)
def test_the_longest_and_topmost_mount_point_wins(path: str, kind: str) -> None:
    found = mounts.find(path, mounts.parse(STACKED))
    assert found is not None and found.file_system == kind


def test_the_options_are_the_mount_s_and_a_file_system_s_ro() -> None:
    table = mounts.read(RECORDED)
    jit, hosts = mounts.find("/var/cache/relaunch/jit", table), mounts.find("/etc/hosts", table)
    assert jit == mounts.Mount("/var/cache/relaunch", "xfs", ("rw", "noexec", "relatime"))
    assert hosts is not None and "ro" in hosts.options


def test_nothing_is_known_without_a_table(tmp_path: Path) -> None:
    assert mounts.find("/x", mounts.read(tmp_path / "none")) is None


def test_this_machine_s_kernel_agrees(tmp_path: Path) -> None:
    assert mounts.file_system(Path("/proc/self")) == "proc"
    assert mounts.file_system(tmp_path) != mounts.UNKNOWN


@pytest.mark.parametrize("kind", ["nfs4", "wekafs", "vastnfs", "panfs", "orangefs", "smbfs", "fuse.s3fs", "fuse.sshfs"])
def test_network_file_systems(kind: str) -> None:
    assert mounts.is_network(kind)


@pytest.mark.parametrize(
    "kind", ["ext4", "xfs", "zfs", "overlay", "tmpfs", "fuse.fuse-overlayfs", "fuseblk", "unknown"]
)
def test_local_file_systems(kind: str) -> None:
    assert not mounts.is_network(kind)
