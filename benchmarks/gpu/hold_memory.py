"""Hold all memory of the first visible GPU but so many GiB, until ended: `hold_memory.py GIB_TO_LEAVE`.

Through the driver's library alone, so that it holds within a second. Prints one line with the bytes that it got.
"""

from __future__ import annotations

import ctypes
import sys
import time

GIB = 1 << 30
PIECE = 256 << 20


def main() -> None:
    left = int(float(sys.argv[1]) * GIB)
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    for code in (
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(device), 0),
        cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device),
    ):
        if code:
            raise SystemExit(f"the driver answered {code}")
    held = 0
    while True:
        cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        pointer = ctypes.c_void_p()
        if free.value < left + PIECE or cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(PIECE)):
            break
        held += PIECE
    print(held, flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
