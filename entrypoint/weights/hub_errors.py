"""What went wrong while talking to the hub: from an exception to a kind with a text (in the download process), and
from a kind to the line that the operator reads. The client hides causes inside causes."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Stop, denied, disk_full, from_os_error
from ..units import format_duration

if TYPE_CHECKING:
    from .hub import Hub

LONGEST_TEXT = 600  # characters of an error event
TRANSIENT = {"rate_limited", "unreachable", "server_error", "broken_body", "timeout"}


@dataclass(eq=False)
class HubError(Exception):
    """``kind``: rate_limited, gated, bad_token, forbidden, unknown_repo, unknown_revision, unknown_file, not_a_hub,
    tls, unreachable, timeout, server_error, broken_body, disk_full, denied, read_only, too_large, bad_header, xet or
    other. ``retry_after`` in seconds. ``path``: the file that it is about."""

    kind: str
    text: str
    retry_after: float | None = None
    path: str | None = None

    @property
    def transient(self) -> bool:
        """True for what may pass by itself."""
        return self.kind in TRANSIENT

    def document(self) -> dict[str, Any]:
        """Return the values of an ``error`` event."""
        return {**asdict(self), "text": self.text[:LONGEST_TEXT]}


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and what it came from, outermost first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def describe(error: BaseException) -> HubError:
    """Return what the most telling member of the error's chain says."""
    if isinstance(error, HubError):
        return error
    members = list(chain(error))
    for look in (_disk, _http, _network):
        for member in members:
            if found := look(member):
                return found
    return _by_type(error, members)


def _by_type(error: BaseException, members: list[BaseException]) -> HubError:
    """What has neither an error number nor an HTTP answer nor a broken connection in its chain."""
    text = _first_line(error)
    if type(error).__name__ == "SafetensorsParsingError":  # huggingface_hub's, whose cause may be a JSON error
        return HubError("bad_header", text)
    if any(isinstance(member, json.JSONDecodeError) for member in members):
        return HubError("not_a_hub", "the answer is not JSON")
    if any(type(member).__name__ == "FileMetadataError" for member in members):
        return HubError("not_a_hub", "the answer lacks what a hub says of a file")
    if isinstance(error, RuntimeError):
        return HubError("xet", text)
    if isinstance(error, ValueError) and "too large" in str(error):
        return HubError("too_large", text)
    if "Consistency check failed" in str(error):
        return HubError("broken_body", text)
    return HubError("other", f"{type(error).__name__}: {text}")


def _disk(error: BaseException) -> HubError | None:
    text = str(error)
    # Xet raises a bare RuntimeError whose only trace of the number is its text.
    if "No space left on device" in text or "os error 28" in text or getattr(error, "errno", None) == errno.EDQUOT:
        return HubError("disk_full", _first_line(error))
    if not isinstance(error, OSError) or not error.errno:
        return None
    path = str(error.filename) if error.filename else None
    if error.errno == errno.ENOSPC:
        return HubError("disk_full", _first_line(error), path=path)
    if error.errno == errno.EROFS:
        return HubError("read_only", _first_line(error), path=path)
    if error.errno in (errno.EACCES, errno.EPERM) and path:
        return HubError("denied", _first_line(error), path=path)
    return None


# The hub's own error codes, and huggingface_hub's classes (errors.py of 1.33) for answers that lack one.
_BY_CODE = {
    "GatedRepo": "gated",
    "RepoNotFound": "unknown_repo",
    "RevisionNotFound": "unknown_revision",
    "EntryNotFound": "unknown_file",
}
_BY_CLASS = {
    "GatedRepoError": "gated",
    "RepositoryNotFoundError": "unknown_repo",
    "RevisionNotFoundError": "unknown_revision",
    "EntryNotFoundError": "unknown_file",
    "RemoteEntryNotFoundError": "unknown_file",
}
_BY_STATUS = {401: "bad_token", 403: "forbidden"}


def _http(error: BaseException) -> HubError | None:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if response is None or status is None:
        return None
    code = response.headers.get("X-Error-Code", "")
    message = response.headers.get("X-Error-Message", "") or _first_line(error)
    kind = _BY_CODE.get(code) or _BY_CLASS.get(type(error).__name__)
    if status == 429:
        return HubError("rate_limited", message, retry_after=_retry_after(response.headers))
    if status == 401 and kind != "gated" and code != "RepoNotFound" and "nvalid" in message:
        return HubError("bad_token", message)
    kind = kind or _BY_STATUS.get(status)
    if kind is not None:
        return HubError(kind, message)
    if status == 407:
        return HubError("unreachable", f"the proxy wants credentials: {message}")
    if status >= 500 or status == 408:
        return HubError("server_error", f"HTTP {status}")
    if status == 404:
        return HubError("not_a_hub", f"HTTP 404 without a hub's error code for {response.request.url.path}")
    return HubError("other", f"HTTP {status}: {message}")


def _retry_after(headers: Any) -> float | None:
    """Seconds, from Retry-After or from ``RateLimit: "api";r=0;t=55``."""
    value = headers.get("retry-after", "")
    if value.isdecimal():
        return float(value)
    for part in headers.get("ratelimit", "").split(";"):
        if part.strip().startswith("t=") and part.strip()[2:].isdecimal():
            return float(part.strip()[2:])
    return None


# httpx' and httpcore's exceptions; httpcore's are not subclasses of httpx'.
_BY_CONNECTION = {
    **dict.fromkeys(("ConnectTimeout", "ReadTimeout", "WriteTimeout", "PoolTimeout"), "timeout"),
    **dict.fromkeys(("RemoteProtocolError", "ReadError", "WriteError", "CloseError", "DecodingError"), "broken_body"),
    **dict.fromkeys(("ConnectError", "ProxyError", "NetworkError"), "unreachable"),
    "LocalProtocolError": "bad_token",
}


def _network(error: BaseException) -> HubError | None:
    import ssl

    name, text = type(error).__name__, _first_line(error)
    if isinstance(error, ssl.SSLError) or "CERTIFICATE_VERIFY_FAILED" in text or "SSL" in text[:12]:
        return HubError("tls", text)
    module = type(error).__module__.partition(".")[0]
    kind = _BY_CONNECTION.get(name) if module in ("httpx", "httpcore") else None
    if kind is None:
        return None
    if kind == "unreachable" and any(isinstance(m, ssl.SSLError) for m in chain(error)):
        return HubError("tls", text)
    # The text of a header that cannot be sent repeats the header, token included.
    return HubError(kind, "the token cannot be sent as a header" if kind == "bad_token" else text or name)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def stop_for(event: Mapping[str, Any], hub: Hub, repo: str, revision: str) -> Stop:
    """Return the refusal for an ``error`` event (`HubError.document`). No token ever gets into its text."""
    kind = str(event.get("kind"))
    text = hub.scrub(str(event.get("text", "")))[:300]
    where = Path(str(event["path"])) if event.get("path") else hub.cache
    if kind == "disk_full":
        return disk_full(hub.cache, hub.setting)
    if kind == "read_only":
        return from_os_error(OSError(errno.EROFS, text), where, hub.setting)
    if kind == "denied":
        return denied(where, hub.setting)
    if kind == "rate_limited":
        wait = event.get("retry_after")
        again = f"try again in {format_duration(float(wait))}" if wait else "try again in some minutes"
        more = "" if hub.token else ", or set HF_TOKEN (limits are higher with one)"
        return Stop("hub_rate_limited", f"{hub.endpoint} limits requests (HTTP 429): {text}", again + more)
    row = _refusals(hub, repo, revision, text).get(kind)
    return (
        Stop(*row)
        if row
        else Stop(
            "hub_unavailable",
            f"{hub.endpoint} cannot be used: {text}",
            "check the network, HF_ENDPOINT and HTTPS_PROXY; what was fetched is kept",
        )
    )


def _refusals(hub: Hub, repo: str, revision: str, text: str) -> dict[str, tuple[str, str, str]]:
    """Cause, message and next step by kind."""
    page = f"{hub.endpoint}/{repo}"
    return {
        "gated": (
            "hub_gated",
            f"{repo} is gated and {'this token has no access to it' if hub.token else 'no token is set'}",
            f"request access at {page}" + ("" if hub.token else ", then set HF_TOKEN"),
        ),
        "bad_token": (
            "hub_gated",
            f"{hub.endpoint} {'refuses the' if hub.token else 'asks for a'} token (HTTP 401)",
            "set HF_TOKEN to a valid token; a wrong one breaks public models too" if hub.token else "set HF_TOKEN",
        ),
        "forbidden": (
            "hub_gated",
            f"{hub.endpoint} forbids {repo} (HTTP 403): {text}",
            f"request access at {page}, or use a token that may read it",
        ),
        "unknown_repo": (
            "config_rejected",
            f"RELAUNCH_MODEL={repo} is no repository of {hub.endpoint}"
            + (" that this token may see" if hub.token else ", or a private one and no token is set"),
            "check the spelling" + ("" if hub.token else ", or set HF_TOKEN"),
        ),
        "unknown_revision": (
            "config_rejected",
            f"{repo} has no revision {revision}",
            "check RELAUNCH_REVISION: a branch, a tag or all 40 digits of a commit",
        ),
        "unknown_file": (
            "config_rejected",
            f"{repo} at {revision} lacks a file that the manifest names: {text}",
            "check RELAUNCH_MANIFEST and RELAUNCH_REVISION",
        ),
        "not_a_hub": (
            "hub_unavailable",
            f"{hub.endpoint} does not answer like a hub ({text})",
            "a captive portal or proxy may answer in its place: check HF_ENDPOINT and HTTPS_PROXY",
        ),
        "tls": (
            "hub_unavailable",
            f"no trusted TLS connection to {hub.endpoint}: {text}",
            "if a proxy signs with its own certificate, set SSL_CERT_FILE to its authority",
        ),
        "bad_header": (
            "weights_corrupt",
            f"{repo} at {revision}: {text}",
            "the published file is bad: choose another RELAUNCH_REVISION",
        ),
        "too_large": (
            "config_rejected",
            f"{repo}: a file is too large for plain HTTP",
            "unset HF_HUB_DISABLE_XET and RELAUNCH_DOWNLOAD_MAX_RATE: above 50 GB the hub needs Xet",
        ),
    }
