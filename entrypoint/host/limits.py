"""Resource limits of this process, which its children inherit."""

from __future__ import annotations

import errno
import resource

# The engine asks for this many itself (sglang `utils/common.py:set_ulimit`); more only slows down what closes all.
MAX_FILES = 65535
_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


def set_limits() -> None:
    """Allow as many open files as the hard limit does, and no core dump.

    The usual soft limit of 1,024 is within reach of one idle client. A core of an engine holds prompts and keys, and
    has the size of the host's memory.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def is_exhaustion(error: BaseException) -> bool:
    """Return True when ``error`` says that this process, or the host, is out of descriptors or memory: it tells
    nothing of what was being looked at."""
    return isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES


def open_files() -> int | None:
    """The hard limit of open files, to which the engine may raise its own. None: unlimited."""
    return _hard(resource.RLIMIT_NOFILE)


def lockable_bytes() -> int | None:
    """How many bytes of memory a process may lock. None: unlimited."""
    return _hard(resource.RLIMIT_MEMLOCK)


def _hard(kind: int) -> int | None:
    limit = resource.getrlimit(kind)[1]
    return None if limit == resource.RLIM_INFINITY else limit
