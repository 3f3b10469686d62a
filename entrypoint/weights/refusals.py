"""From a fault of the download child to the one line that the operator reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import Stop
from ..units import format_duration
from . import faults
from .environment import Hub


def stop_for(event: Mapping[str, Any], hub: Hub, repo: str, revision: str) -> Stop:
    """Cause, message and next step for an ``error`` event. No token ever gets into the text."""
    kind = str(event.get("kind"))
    text = hub.scrub(str(event.get("text", "")))[:300]
    page = f"{hub.endpoint}/{repo}"
    where = Path(str(event["path"])) if event.get("path") else hub.cache
    if kind == "disk_full":
        return faults.disk_full(hub.cache, hub.setting)
    if kind == "read_only":
        return Stop(
            "permission_denied",
            f"the cache {where} is on a read-only file system",
            f"mount it writable, or let {hub.setting} name another place",
        )
    if kind == "denied":
        return faults.denied(where, hub.setting)
    if kind == "rate_limited":
        wait = event.get("retry_after")
        again = f"try again in {format_duration(float(wait))}" if wait else "try again in some minutes"
        more = "" if hub.token else ", or set HF_TOKEN (limits are higher with one)"
        return Stop("hub_rate_limited", f"{hub.endpoint} limits requests (HTTP 429): {text}", again + more)
    rows: dict[str, tuple[str, str, str]] = {
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
        "too_large": (
            "config_rejected",
            f"{repo}: a file is too large for plain HTTP",
            "unset HF_HUB_DISABLE_XET and RELAUNCH_DOWNLOAD_MAX_RATE: above 50 GB the hub needs Xet",
        ),
    }
    if kind in rows:
        return Stop(*rows[kind])
    return Stop(
        "hub_unavailable",
        f"{hub.endpoint} cannot be used: {text}",
        "check the network, HF_ENDPOINT and HTTPS_PROXY; what was fetched is kept",
    )
