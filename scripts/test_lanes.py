"""`./relaunch test --all [PYTEST OPTIONS]`: every lane, the quickest first, each with its slowest tests named.

A lane that fails does not keep the next from running; Ctrl-C and SIGTERM end the lane that runs, with what it has set
up, and start no other. Ends with the exit code of the first lane that failed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

RELAUNCH = Path(__file__).resolve().parents[1] / "relaunch"
LANES = ("fast", "supervisor", "engine", "packaging")
# pytest: no test was collected, as when somebody's options choose none of this lane.
NONE_CHOSEN = 5


def main() -> int:
    """The script. Returns its exit code."""
    codes: dict[str, int] = {}
    interrupted: list[int] = []
    for lane in LANES:
        print(f"== lane {lane}", flush=True)
        began = time.monotonic()
        child = subprocess.Popen([str(RELAUNCH), "test", "--lane", lane, "--durations=15", *sys.argv[1:]])

        def pass_on(number: int, _: object, child: subprocess.Popen[bytes] = child) -> None:
            interrupted.append(number)
            if number != signal.SIGINT:  # a terminal has sent that one to the lane as well
                child.send_signal(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, pass_on)
        codes[lane] = child.wait()
        said = {0: "passed", NONE_CHOSEN: "nothing chosen"}.get(codes[lane], f"FAILED with {codes[lane]}")
        print(f"== lane {lane}: {said}, {time.monotonic() - began:.0f} s", flush=True)
        if interrupted:
            return 128 + interrupted[0]
    return next((code for code in codes.values() if code not in (0, NONE_CHOSEN)), 0)


if __name__ == "__main__":
    sys.exit(main())
