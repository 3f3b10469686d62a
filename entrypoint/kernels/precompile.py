"""Compile kernels ahead: what `relaunch warm` does, and an image build with ``WARM``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import cuda_home, kernels
from .kernels import Kernel

# Memory that an image build counts on where /proc/meminfo cannot be read.
FALLBACK_MEMORY = 4 << 30
# Characters of a compiler's error that are passed on.
REASON_CHARS = 300


@dataclass(frozen=True)
class CompileResult:
    """How one kernel's build ended. ``state``: found (nothing was compiled), compiled, failed. ``seconds`` is the build
    alone; ``cpu_seconds`` and ``peak_bytes`` (of the largest process) those of its compilers."""

    kernel: Kernel
    state: str
    seconds: float
    detail: str
    cpu_seconds: float = 0.0
    peak_bytes: int = 0


def compile_ahead(
    wanted: Iterable[Kernel],
    cache_dir: Path,
    sm: int,
    environ: Mapping[str, str],
    memory_available: Callable[[], int],
    max_jobs: int | None = None,
    progress: Callable[[str], None] = print,
) -> list[CompileResult]:
    """Build each kernel for ``sm`` in a process of its own, with ``max_jobs`` compiler jobs or as many as the
    bytes hold that ``memory_available`` returns; ``progress`` gets a line before and after each.
    Raises OSError when the cache cannot be written, RuntimeError without a compiler."""
    if cuda_home.ensure(cache_dir, environ) is None:
        raise RuntimeError("no CUDA compiler among the installed packages (nvidia-cuda-nvcc)")
    ours = kernels.environment(cache_dir, [sm])
    place = Path(environ.get("FLASHINFER_WORKSPACE_BASE", ours["FLASHINFER_WORKSPACE_BASE"]))
    place.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join((str(Path(sys.executable).parent), environ.get("PATH", os.defpath)))
    base = {**ours, **environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "FLASHINFER_LOGGING_LEVEL": "warning"}
    results = []
    for number, kernel in enumerate(chosen := list(wanted), 1):
        jobs = max_jobs or kernels.jobs(memory_available(), os.cpu_count() or 1, kernel)
        known = "" if kernels.is_compiled(kernel, place, sm) else f", about {kernel.seconds} s on two cores"
        progress(f"[{number}/{len(chosen)}] {kernel.name}: {kernel.used_by} ({jobs} jobs{known})")
        script = str(Path(__file__).with_name("compile.py"))
        command = [sys.executable, "-P", script, kernel.library, str(sm), kernel.make, *map(str, kernel.arguments)]
        done = subprocess.run(
            command, env={**base, "MAX_JOBS": str(jobs)}, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        result = _result(kernel, done)
        progress(f"[{number}/{len(chosen)}] {kernel.name}: {result.state} in {result.seconds:.0f} s{result.detail}")
        results.append(result)
    return results


def _result(kernel: Kernel, done: subprocess.CompletedProcess[str]) -> CompileResult:
    if done.returncode == 0 and done.stdout.strip():
        document = json.loads(done.stdout.strip().splitlines()[-1])
        state = "compiled" if document["compiled"] else "found"
        return CompileResult(kernel, state, document["seconds"], "", document["cpu_seconds"], document["peak_bytes"])
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    # The compiler's own message says more than the traceback around it.
    errors = [line for line in lines if "error" in line.lower() or "killed" in line.lower()] or lines[-1:]
    reason = errors[0].strip()[:REASON_CHARS] if errors else "no output"
    if done.returncode < 0:
        reason = f"killed by signal {-done.returncode}"
    return CompileResult(kernel, "failed", 0.0, f": {reason}")


def _memory_available() -> int:
    """MemAvailable in bytes, for image builds: `host.memory` reads it elsewhere, through psutil."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return FALLBACK_MEMORY


def select(names: str, sm: int) -> list[Kernel]:
    """``all`` or a comma-separated list. Raises KeyError for a name that does not exist."""
    known = {kernel.name: kernel for kernel in kernels.BY_SM.get(sm, ())}
    return list(known.values()) if names == "all" else [known[name] for name in names.split(",")]


def main() -> int:
    """For image builds: ``precompile SM CACHE_DIR TARGET NAMES [JOBS]``. The cache has the path that it will have when
    the image runs, since build files carry it; the result is moved out of the way of the volume."""
    sm, cache, target = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    jobs = int(sys.argv[5]) if len(sys.argv) > 5 else None
    results = compile_ahead(select(sys.argv[4], sm), cache, sm, os.environ, _memory_available, jobs)
    source = kernels.directory(cache)
    target.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, target / source.name, symlinks=True)
    shutil.rmtree(cache)
    return int(any(result.state == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
