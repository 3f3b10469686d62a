"""Start a program that the kernel kills when its parent dies, whatever the parent dies of.

`subprocess` offers `preexec_fn` for this, which is unsafe in a process with threads: the child of a fork may wait for
ever for a lock that another thread held. So this file is run as a program of its own, which asks for the signal and
then becomes the program that was asked for.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def tied_to_parent(argv: Sequence[str]) -> list[str]:
    """Return the command that runs ``argv`` as a child that dies with this process. The signal is tied to the thread
    that starts the child: start it from one that lives as long as the process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *argv]


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends. Exits at once when ``parent``, its pid, is gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    """Make orphans below this process its children instead of pid 1's, so that it can reap them. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def main() -> None:
    """Become the program whose command line follows the parent's pid."""
    die_with_parent(int(sys.argv[1]))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by every Python, and that is inherited
        signal.signal(number, signal.SIG_DFL)
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
