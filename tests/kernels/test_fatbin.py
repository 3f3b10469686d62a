"""GPU code of a binary, read from a file that is laid out here byte by byte."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from entrypoint.kernels import binaries, fatbin
from entrypoint.kernels.fatbin import Image

SM120A, SM120, SM90A, SM86, SM75 = (
    Image("elf", 120, True),
    Image("elf", 120),
    Image("elf", 90, True),
    Image("elf", 86),
    Image("elf", 75),
)


def entry(image: Image, payload: bytes = b"x" * 40) -> bytes:
    kind = 2 if image.kind == "elf" else 1
    header = struct.pack("<HHIQ12xI8xQ", kind, 0x101, 64, len(payload), image.arch, 0x11 | 0x100000 * image.specific)
    return header.ljust(64, b"\0") + payload


def container(*images: Image) -> bytes:
    body = b"".join(map(entry, images))
    return struct.pack("<IHHQ", fatbin.MAGIC, 1, 16, len(body)) + body


def shared_object(*units: bytes, section: bytes = b".nv_fatbin", padding: bytes = b"\0" * 8) -> bytes:
    """A 64-bit ELF file of three sections: none, the names, the fat binaries."""
    names = b"\0.shstrtab\0" + section + b"\0"
    code = padding.join(units)
    table = 64 + len(names) + len(code)
    rows = [(0, 0, 0), (1, 64, len(names)), (11, 64 + len(names), len(code))]
    header = b"\x7fELF\x02\x01\x01".ljust(0x28, b"\0") + struct.pack("<Q", table)
    header = header.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, 3, 1)
    sections = b"".join(struct.pack("<I4x8x8xQQ24x", *row) for row in rows)
    return header + names + code + sections


def test_units_and_their_images_are_read(tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    file.write_bytes(shared_object(container(SM86, SM120A), container(SM90A, Image("ptx", 75))))
    assert fatbin.read(file) == [{SM86, SM120A}, {SM90A, Image("ptx", 75)}]


@pytest.mark.parametrize(
    "content",
    [b"", b"not a library", b"\x7fELF\x01", b"\x7fELF\x02" + b"\0" * 59, shared_object(section=b".data_only")],
)
def test_files_without_gpu_code_are_empty(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "lib.so"
    file.write_bytes(content)
    assert fatbin.read(file) == []


def test_a_file_cut_short_does_not_raise(tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    whole = shared_object(container(SM86))
    for size in range(5, len(whole), 7):
        file.write_bytes(whole[:size])
        fatbin.read(file)


@pytest.mark.parametrize(
    ("image", "runs"),
    [
        (SM120, True),
        (SM120A, True),
        (SM90A, False),
        (SM86, False),
        (Image("elf", 121), False),
        (Image("ptx", 75), True),
        (Image("ptx", 90, True), False),
        (Image("ptx", 121), False),
    ],
)
def test_what_runs_on_sm120(image: Image, runs: bool) -> None:
    assert image.runs_on(120) is runs


def test_machine_code_runs_on_a_newer_minor() -> None:
    assert SM86.runs_on(89) and SM120.runs_on(121) and not SM120A.runs_on(121)


def unit(*images: Image) -> fatbin.Unit:
    return frozenset(images)


def test_a_file_without_code_is_named_with_what_is_lost() -> None:
    found = {"sgl_kernel/flash_ops.abi3.so": [unit(SM86)], "sgl_kernel/common_ops.abi3.so": [unit(SM120A, SM86)]}
    finding = binaries.judge("sglang-kernel", "0.4.10", found, 120)
    assert finding.verdict == "warn"
    assert "flash_ops" in finding.detail and "common_ops" not in finding.detail
    assert "FlashAttention 3" in finding.detail and "sm_86" in finding.detail


def test_units_for_other_gpus_alone_are_no_loss() -> None:
    finding = binaries.judge("nvidia-cublas", "13", {"libcublas.so": [unit(SM90A), unit(SM120)]}, 120)
    assert (finding.verdict, finding.detail) == ("pass", "code for SM120 in 1 of 2 units")


def test_only_what_the_engine_needs_fails() -> None:
    assert binaries.judge("torch", "2", {"libtorch_cuda.so": [unit(SM86)]}, 120).verdict == "fail"
    assert binaries.judge("sgl-deep-ep", "0", {"_C.so": [unit(SM90A)]}, 120).verdict == "warn"
