"""A CUDA_HOME made of the wheels' own compiler, headers and libraries.

The wheels lack what a CUDA installation has and FlashInfer links with: a folder `lib64`, unversioned library names
and a stub of the driver's library. They are added around symbolic links; nothing is copied.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path


def find_nvcc(environ: Mapping[str, str]) -> Path | None:
    """The CUDA compiler: of the operator's CUDA_HOME, of the wheels, or of a CUDA installation; None without one."""
    given = (environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    homes = [*(Path(home) for home in given if home), wheels(), Path("/usr/local/cuda")]
    return next((home / "bin/nvcc" for home in homes if home and (home / "bin/nvcc").is_file()), None)


def wheels() -> Path | None:
    """The folder into which NVIDIA's wheels put compiler and headers; None without a compiler."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for folder in sorted(Path(place).glob("cu[0-9]*"), reverse=True):
            if (folder / "bin/nvcc").is_file():
                return folder
    return None


def place(cache_dir: Path) -> Path | None:
    """Where the CUDA_HOME of this environment's wheels belongs; it may not exist yet."""
    source = wheels()
    if source is None:
        return None
    # The linked files live in the environment: another one, or another compiler in it, is another home.
    stamp = f"{source}\n{(source / 'bin/nvcc').stat().st_mtime_ns}"
    return cache_dir / "cuda" / hashlib.sha256(stamp.encode()).hexdigest()[:12]


def ensure(cache_dir: Path, environ: Mapping[str, str]) -> Path | None:
    """CUDA_HOME to compile with: the operator's, else one made here on first use. None without a compiler.
    Raises OSError when the cache cannot be written."""
    given = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if given:
        return Path(given)
    target = place(cache_dir)
    if target is not None and not (target / "bin/nvcc").exists():
        create(target)
    return target


def create(target: Path) -> None:
    """Lay out ``target``. Safe beside another process that does the same. Raises OSError, or RuntimeError when the
    wheels have no compiler."""
    source = wheels()
    if source is None:
        raise RuntimeError("no CUDA compiler among the installed packages (nvidia-cuda-nvcc)")
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=target.parent, prefix=".cuda-"))
    made.chmod(0o755)
    for name in ("bin", "include", "nvvm"):
        (made / name).symlink_to(source / name)
    lib = made / "lib64"
    (lib / "stubs").mkdir(parents=True)
    (made / "lib").symlink_to("lib64")
    for library in sorted((source / "lib").iterdir()):
        (lib / library.name).symlink_to(library)
        plain = lib / (library.name.partition(".so.")[0] + ".so")
        if ".so." in library.name and not plain.exists():
            plain.symlink_to(library.name)
    _stub(lib / "stubs/libcuda.so")
    try:
        made.rename(target)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not (target / "bin/nvcc").exists():
            raise


def _stub(path: Path) -> None:
    """A libcuda to link against: an empty library of the driver's name, or the driver's own."""
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("g++")
    if compiler:
        command = [compiler, "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(path), "-x", "c", os.devnull]
        with contextlib.suppress(OSError):
            if subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60).returncode == 0:
                return
    for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/run/opengl-driver/lib", "/usr/local/nvidia/lib64"):
        if (Path(folder) / "libcuda.so.1").exists():
            path.symlink_to(Path(folder) / "libcuda.so.1")
            return


def versions(cuda_home: Path | None = None) -> tuple[str | None, str | None]:
    """(compiler, headers) as ``13.0``, from nvcc itself and from ``cuda_runtime_api.h``; None what cannot be read."""
    given = os.environ.get("CUDA_HOME")
    root = cuda_home or (Path(given) if given else wheels())
    if root is None:
        return None, None
    compiler = headers = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run([str(root / "bin/nvcc"), "--version"], capture_output=True, text=True, timeout=30).stdout
        compiler = found[1] if (found := re.search(r"release (\d+\.\d+)", said)) else None
    with contextlib.suppress(OSError):
        text = (root / "include/cuda_runtime_api.h").read_text(errors="replace")
        if found := re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", text, re.M):
            headers = f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}"
    return compiler, headers


def main() -> int:
    """For image builds: ``cuda_home TARGET``."""
    create(Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
