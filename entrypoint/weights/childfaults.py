"""What went wrong while talking to the hub, as a kind with a text. The client hides causes inside causes."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

TRANSIENT = {"rate_limited", "unreachable", "server_error", "broken_body", "timeout"}


@dataclass(eq=False)
class Fault(Exception):
    """``kind``: rate_limited, gated, bad_token, forbidden, unknown_repo, unknown_revision, unknown_file, not_a_hub,
    tls, unreachable, timeout, server_error, broken_body, disk_full, denied, read_only, too_large, xet or other."""

    kind: str
    text: str
    retry_after: float | None = None
    path: str | None = None

    @property
    def transient(self) -> bool:
        return self.kind in TRANSIENT

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "text": self.text[:600]}


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from, outermost first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def describe(error: BaseException) -> Fault:
    """The most telling member of the chain."""
    if isinstance(error, Fault):
        return error
    members = list(chain(error))
    text = _first_line(error)
    for member in members:
        if fault := _disk(member):
            return fault
    for member in members:
        if fault := _http(member):
            return fault
    for member in members:
        if fault := _network(member):
            return fault
    if isinstance(error, json.JSONDecodeError) or any(isinstance(m, json.JSONDecodeError) for m in members):
        return Fault("not_a_hub", "the answer is not JSON")
    if any(type(m).__name__ == "FileMetadataError" for m in members):
        return Fault("not_a_hub", "the answer lacks what a hub says of a file")
    if isinstance(error, RuntimeError):
        return Fault("xet", text)
    if isinstance(error, ValueError) and "too large" in str(error):
        return Fault("too_large", text)
    if "Consistency check failed" in str(error):
        return Fault("broken_body", text)
    return Fault("other", f"{type(error).__name__}: {text}")


def _disk(error: BaseException) -> Fault | None:
    text = str(error)
    # Xet raises a bare RuntimeError whose only trace of the number is its text.
    if "No space left on device" in text or "os error 28" in text or getattr(error, "errno", None) == errno.EDQUOT:
        return Fault("disk_full", _first_line(error))
    if not isinstance(error, OSError) or not error.errno:
        return None
    path = str(error.filename) if error.filename else None
    if error.errno == errno.ENOSPC:
        return Fault("disk_full", _first_line(error), path=path)
    if error.errno == errno.EROFS:
        return Fault("read_only", _first_line(error), path=path)
    if error.errno in (errno.EACCES, errno.EPERM) and path:
        return Fault("denied", _first_line(error), path=path)
    return None


def _http(error: BaseException) -> Fault | None:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if response is None or status is None:
        return None
    code = response.headers.get("X-Error-Code", "")
    message = response.headers.get("X-Error-Message", "") or _first_line(error)
    name = type(error).__name__
    if status == 429:
        return Fault("rate_limited", message, retry_after=_retry_after(response.headers))
    if code == "GatedRepo" or name == "GatedRepoError":
        return Fault("gated", message)
    if status == 401 and "nvalid" in message and code != "RepoNotFound":
        return Fault("bad_token", message)
    if code == "RepoNotFound" or name == "RepositoryNotFoundError":
        return Fault("unknown_repo", message)
    if code == "RevisionNotFound" or name == "RevisionNotFoundError":
        return Fault("unknown_revision", message)
    if code == "EntryNotFound" or "EntryNotFound" in name:
        return Fault("unknown_file", message)
    if status == 401:
        return Fault("bad_token", message)
    if status == 403:
        return Fault("forbidden", message)
    if status == 407:
        return Fault("unreachable", f"the proxy wants credentials: {message}")
    if status >= 500 or status == 408:
        return Fault("server_error", f"HTTP {status}")
    if status == 404:
        return Fault("not_a_hub", f"HTTP 404 without a hub's error code for {response.request.url.path}")
    return Fault("other", f"HTTP {status}: {message}")


def _retry_after(headers: Any) -> float | None:
    """Seconds, from Retry-After or from ``RateLimit: "api";r=0;t=55``."""
    value = headers.get("retry-after", "")
    if value.isdecimal():
        return float(value)
    for part in headers.get("ratelimit", "").split(";"):
        if part.strip().startswith("t=") and part.strip()[2:].isdecimal():
            return float(part.strip()[2:])
    return None


def _network(error: BaseException) -> Fault | None:
    import ssl

    name, text = type(error).__name__, _first_line(error)
    if isinstance(error, ssl.SSLError) or "CERTIFICATE_VERIFY_FAILED" in text or "SSL" in text[:12]:
        return Fault("tls", text)
    module = type(error).__module__.partition(".")[0]
    if module not in ("httpx", "httpcore"):
        return None
    if name in ("ConnectTimeout", "ReadTimeout", "WriteTimeout", "PoolTimeout"):
        return Fault("timeout", text or name)
    if name in ("RemoteProtocolError", "ReadError", "WriteError", "CloseError", "DecodingError"):
        return Fault("broken_body", text or name)
    if name in ("ConnectError", "ProxyError", "NetworkError"):
        if any(isinstance(m, ssl.SSLError) for m in chain(error)):
            return Fault("tls", text)
        return Fault("unreachable", text or name)
    if name == "LocalProtocolError":
        # Its text repeats the header, token included.
        return Fault("bad_token", "the token cannot be sent as a header")
    return None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
