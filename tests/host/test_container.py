"""In which container or unit a process runs, and how long a stop may take there."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded import tree

from entrypoint.host import container

DOCKER_ID = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        (f"0::/system.slice/docker-{DOCKER_ID}.scope", "container 0123456789ab"),
        (f"5:memory:/docker/{DOCKER_ID}", "container 0123456789ab"),
        (f"0::/machine.slice/libpod-{DOCKER_ID}.scope", "container 0123456789ab"),
        (
            "0::/kubepods.slice/kubepods-pod0af53a1c_91b3_4f43_8e0f_7a2a6d3c5b11.slice/cri-containerd-12ab.scope",
            "pod 0af53a1c-91b3-4f43-8e0f-7a2a6d3c5b11",
        ),
        ("0::/system.slice/vllm.service", "unit vllm.service"),
        ("0::/user.slice/user-1000.slice/session-3.scope", None),
    ],
)
def test_which_container_a_process_is_in(tmp_path: Path, cgroup: str, expected: str | None) -> None:
    assert container.container_of(7, tree(tmp_path, {"proc/7/cgroup": cgroup + "\n"})) == expected


def test_the_host_s_ipc_namespace_is_known_by_its_inode(tmp_path: Path) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    link = tmp_path / "proc/self/ns/ipc"
    link.symlink_to("ipc:[4026531839]")
    assert container.ipc_host(True, tmp_path) is True
    assert container.ipc_host(False, tmp_path) is False
    link.unlink()
    link.symlink_to("ipc:[4026532201]")
    assert container.ipc_host(True, tmp_path) is False


@pytest.mark.parametrize(
    ("text", "seconds"), [("1min 30s", 90.0), ("infinity", float("inf")), ("10s", 10.0), ("x", None)]
)
def test_systemd_s_time_spans(text: str, seconds: float | None) -> None:
    assert container.parse_time_span(text) == seconds


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({"run/.containerenv": ""}, "podman"),
        ({".dockerenv": ""}, "docker"),
        ({"proc/1/cgroup": "0::/kubepods.slice/x\n"}, "kubernetes"),
        ({"proc/1/cgroup": f"0::/system.slice/docker-{DOCKER_ID}.scope\n"}, "docker"),
        ({"proc/1/cgroup": "0::/init.scope\n"}, None),
    ],
)
def test_the_kind_of_container(files: dict[str, str | bytes], kind: str | None, tmp_path: Path) -> None:
    assert container.container(tree(tmp_path, files)) == kind


def test_who_ends_us_after_a_stop_request(tmp_path: Path) -> None:
    assert container.stop_grace("kubernetes").manager == "kubernetes"
    assert container.stop_grace("docker").manager == "container"
    session = tree(tmp_path / "a", {"proc/self/cgroup": "0::/system.slice/ssh.service\n"})
    assert container.stop_grace(None, session).manager == "terminal"
    unit = tree(tmp_path / "b", {"proc/self/cgroup": "0::/system.slice/relaunch.service\n"})
    assert container.stop_grace(None, unit).unit == "relaunch.service"
