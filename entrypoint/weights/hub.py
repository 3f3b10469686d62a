"""The hub as this run uses it: its cache, endpoint and token, and the environment of the download process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import Stop, config_rejected, unreadable
from ..host import mounts
from ..scrub import HUB_TOKENS, Scrubber, without_user

if TYPE_CHECKING:
    from ..config.settings import Loaded

_TRUE = {"1", "ON", "YES", "TRUE"}
_FALSE = {"", "0", "OFF", "NO", "FALSE"}

# Whole seconds: the client refuses to be imported with anything else.
_SECONDS = {"HF_HUB_ETAG_TIMEOUT": 15, "HF_HUB_DOWNLOAD_TIMEOUT": 30}

_CHILD = {
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_EXPERIMENTAL_WARNING": "1",
    # Payloads outside the repository's folder are lost when that folder is copied or mounted alone.
    "HF_HUB_DISABLE_SHARED_BLOBS": "1",
    "HF_XET_CLIENT_READ_TIMEOUT": "60s",
    "HF_XET_CLIENT_CONNECT_TIMEOUT": "20s",
}


@dataclass(frozen=True)
class Hub:
    """``cache``: the hub cache's directory; ``setting``: the variable that chose it. ``environ``: everything that
    a child needs. ``token`` never leaves this record except into a child's environment."""

    cache: Path
    setting: str
    offline: bool
    endpoint: str
    token: str | None
    environ: Mapping[str, str]

    def folder(self, repo: str) -> Path:
        """Return the folder of ``repo`` in the cache."""
        return self.cache / f"models--{repo.replace('/', '--')}"

    def scrub(self, text: str) -> str:
        """Return ``text`` as one line without the token, or anything that looks like one."""
        return " ".join(Scrubber((self.token,))(text).split())


def read(loaded: Loaded, environ: Mapping[str, str]) -> Hub:
    """Return the hub that ``environ``, else the preset, names. Raises Stop (78) for a value that the hub client would
    misread or die of."""
    env = {**loaded.environment, **environ}
    offline = loaded.settings.offline
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        word = env.get(name, "").strip().upper()
        if word in _TRUE:
            offline = True
        elif word not in _FALSE:
            raise config_rejected(
                f"{name}={env[name]} is neither true nor false for the hub client, which would go online",
                f"write {name}=1, or RELAUNCH_OFFLINE=1",
            )
    for name in _SECONDS:
        if (value := env.get(name, "").strip()) and not value.isdecimal():
            raise config_rejected(
                f"{name}={value}: the hub client takes whole seconds only", f"write {name}={_SECONDS[name]}"
            )
    cache, setting = _cache(env)
    endpoint = env.get("HF_ENDPOINT", "").strip().rstrip("/") or "https://huggingface.co"
    if not re.match(r"https?://[^/]", endpoint):
        raise config_rejected(f"HF_ENDPOINT={without_user(endpoint)} is not a URL", "write https://host")
    return Hub(cache, setting, offline, endpoint, None if offline else _token(env), env)


def child_environ(hub: Hub, *, xet: bool) -> dict[str, str]:
    """Return what the download process runs with: the caller's environment, capped time-outs and one token. ``xet``
    allows the Xet protocol."""
    env = {name: value for name, value in hub.environ.items() if name not in HUB_TOKENS}
    for name, value in _CHILD.items():
        env.setdefault(name, value)
    for name, seconds in _SECONDS.items():
        if not env.get(name, "").strip():
            env[name] = str(seconds)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "PYTHONPATH", "HF_DEBUG"):
        env.pop(name, None)
    if hub.token:
        env["HF_TOKEN"] = hub.token
    else:
        env["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"
    env["HF_HUB_CACHE"] = str(hub.cache)
    if not xet:
        env["HF_HUB_DISABLE_XET"] = "1"
    if mounts.on_network(hub.cache):
        # Parallel vectored writes are not safe on NFS.
        env.setdefault("HF_XET_RECONSTRUCTION_USE_VECTORED_WRITE", "0")
    return env


def _cache(env: Mapping[str, str]) -> tuple[Path, str]:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if env.get(name, "").strip():
            return _path(env[name]), name
    if env.get("HF_HOME", "").strip():
        return _path(env["HF_HOME"]) / "hub", "HF_HOME"
    base = env.get("XDG_CACHE_HOME", "").strip() or "~/.cache"
    return _path(base) / "huggingface" / "hub", "HF_HOME"


def _path(text: str) -> Path:
    return Path(os.path.expandvars(text.strip())).expanduser()


def _token(env: Mapping[str, str]) -> str | None:
    """The token as the client would find it, without the line end or byte order mark that editors add."""
    for name in HUB_TOKENS:
        if token := _clean(env.get(name, ""), name):
            return token
    given = env.get("HF_TOKEN_PATH", "").strip()
    home = _path(env["HF_HOME"]) if env.get("HF_HOME", "").strip() else None
    path = _path(given) if given else (home or _path("~/.cache/huggingface")) / "token"
    where = f"HF_TOKEN_PATH={path}" if given else f"the token file {path}"
    try:
        return _clean(path.read_bytes().decode("utf-8-sig"), where)
    except FileNotFoundError:
        return None
    except PermissionError:
        if not given:
            return None
        raise Stop(
            "permission_denied",
            f"{where} is not readable for uid {os.geteuid()}",
            "mount the token readable for this user, or set HF_TOKEN",
        ) from None
    except OSError as error:
        raise unreadable(f"{where} cannot be read: {error.strerror}", "name a file that holds the token") from None
    except UnicodeDecodeError:
        raise config_rejected(f"{where} is not text", "put the token alone into it") from None


def _clean(text: str, where: str) -> str | None:
    token = text.strip().lstrip("\ufeff").strip().strip("'\"")
    if not token:
        return None
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise config_rejected(
            f"{where} holds something that is no token (spaces or control characters)", "put the token alone there"
        )
    return token
