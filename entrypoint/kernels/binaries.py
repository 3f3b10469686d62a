"""Do the installed packages carry code for this GPU, or compile it at run time? Which do neither?"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from . import cuda_home, fatbin

# Nothing works without these; all others cost a feature at most.
REQUIRED = frozenset({"torch", "sglang-kernel", "nvidia-cublas", "nvidia-nccl-cu13"})

# What is lost without code for the GPU, by package or by file, so that a reader can tell whether it matters.
_LOSS = {
    "sgl_kernel/flash_ops.abi3.so": "FlashAttention 3 (--attention-backend fa3)",
    "sgl_kernel/flashmla_ops.abi3.so": "FlashMLA (--attention-backend flashmla)",
    "sgl-flash-mla": "FlashMLA (flashmla_sparse and flashmla_kv)",
    "sgl-deep-ep": "DeepEP all-to-all (--moe-a2a-backend deepep)",
    "nccl-extensions": "NCCL's m2n copies",
    "nvidia-cufft": "only a header is precompiled: it links its kernels for the GPU at run time",
}

# No GPU code inside: compiled for the GPU at hand when first used.
COMPILED_AT_RUN_TIME = (
    "flashinfer-python",
    "sgl-deep-gemm",
    "triton",
    "tilelang",
    "quack-kernels",
    "humming-kernels",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "cuda-tile",
)

# The compiler and the headers that it compiles with come from these; FlashInfer refuses a mixture of CUDA minors.
TOOLCHAIN = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl", "nvidia-cuda-runtime")


@dataclass(frozen=True)
class Finding:
    """What one package has for the GPU. ``verdict``: pass, warn (a feature is lost), fail (the engine cannot work)."""

    package: str
    version: str
    verdict: Literal["pass", "warn", "fail"]
    detail: str

    def line(self) -> str:
        """The finding for the log of an image build."""
        return f"{self.verdict:4} {self.package}=={self.version}: {self.detail}"


def check(sm: int) -> list[Finding]:
    """Every installed package with GPU code, those that compile at run time, and the compiler itself. ``sm``: 120
    for SM120. Empty when no engine is installed. Reads the headers of some 700 files: about two seconds, more when
    they are not in the page cache."""
    distributions = {_normal(d.metadata["Name"]): d for d in metadata.distributions()}
    if "torch" not in distributions:
        return []
    findings = [found for name, d in sorted(distributions.items()) if (found := _examine(name, d, sm))]
    for name in COMPILED_AT_RUN_TIME:
        if name in distributions and all(f.package != name for f in findings):
            findings.append(Finding(name, distributions[name].version, "pass", "compiles for the GPU at run time"))
    return [*findings, *toolchain()]


def known(sm: int, image: Path = Path("/opt/relaunch")) -> list[Finding]:
    """As `check`, but from the record that an image's build made, where there is one: an image does not change."""
    record = image / f"binaries-sm{sm}.json"
    if not record.exists():
        return check(sm)
    return [Finding(**row) for row in json.loads(record.read_text())]


def toolchain() -> list[Finding]:
    """Whether the compiler, its parts and the CUDA headers are of one CUDA version."""
    versions: dict[str, str] = {}
    for name in TOOLCHAIN:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            return [Finding(name, "none", "fail", "not installed: kernels cannot be compiled at run time")]
    minors = {name: ".".join(version.split(".")[:2]) for name, version in versions.items()}
    nvcc = versions["nvidia-cuda-nvcc"]
    if len(set(minors.values())) > 1:
        mixture = ", ".join(f"{name} {versions[name]}" for name in TOOLCHAIN)
        return [Finding("nvidia-cuda-nvcc", nvcc, "fail", f"compiler and headers differ in CUDA version: {mixture}")]
    if shutil.which("c++") is None:
        return [Finding("nvidia-cuda-nvcc", nvcc, "fail", "no C++ compiler beside it (Debian: apt-get install g++)")]
    compiler, headers = cuda_home.versions()
    detail = f"compiler and headers are both of CUDA {minors['nvidia-cuda-nvcc']}"
    if compiler and headers and compiler != headers:
        return [Finding("nvidia-cuda-nvcc", nvcc, "fail", f"CUDA_HOME has nvcc {compiler} and headers of {headers}")]
    return [Finding("nvidia-cuda-nvcc", nvcc, "pass", detail)]


def _examine(name: str, distribution: metadata.Distribution, sm: int) -> Finding | None:
    units: dict[str, list[fatbin.Unit]] = {}
    for file in distribution.files or ():
        if ".so" in file.suffixes:
            path = Path(str(distribution.locate_file(file)))
            found = fatbin.read(path) if path.is_file() and path.stat().st_size else []
            if found:
                units[str(file)] = found
    return judge(name, distribution.version, units, sm) if units else None


def judge(package: str, version: str, units: dict[str, list[fatbin.Unit]], sm: int) -> Finding:
    """The verdict on one package. ``units``: translation units by file, each a set of compiled images.

    A library may hold units for other GPUs alone and choose at run time; a file without any for this one is lost."""
    total = sum(map(len, units.values()))
    usable = {file: sum(any(i.runs_on(sm) for i in unit) for unit in found) for file, found in units.items()}
    lost = sorted(file for file, count in usable.items() if not count)
    if not lost:
        return Finding(package, version, "pass", f"code for SM{sm} in {sum(usable.values())} of {total} units")
    built_for = ", ".join(_names(unit for file in lost for unit in units[file]))
    detail = f"no code for SM{sm} in {', '.join(lost)} (built for {built_for})"
    loss = sorted({_LOSS[key] for key in (package, *lost) if key in _LOSS})
    if loss:
        detail += f"; without it: {'; '.join(loss)}"
    fatal = package in REQUIRED and not any(usable.values())
    return Finding(package, version, "fail" if fatal else "warn", detail)


def _names(units: Iterable[fatbin.Unit]) -> list[str]:
    images = sorted({image for unit in units for image in unit}, key=lambda image: (image.arch, image))
    return [f"{'compute' if image.kind == 'ptx' else 'sm'}_{image.arch}{'a' * image.specific}" for image in images]


def _normal(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()


def main() -> int:
    """For image builds: ``binaries SM RECORD``. Prints the list and keeps it for `known`; 1 when the engine could not
    work with what is there."""
    sm, record = int(sys.argv[1]), Path(sys.argv[2])
    findings = check(sm)
    for finding in findings:
        print(finding.line())
    record.write_text(json.dumps([vars(finding) for finding in findings], indent=1) + "\n")
    return int(any(finding.verdict == "fail" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
