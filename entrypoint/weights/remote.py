"""A checkpoint's config and shard headers from the hub, by range requests, before anything is downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..checkpoint import headers as checkpoint_shards
from ..checkpoint.checkpoint import Checkpoint, assemble
from ..checkpoint.headers import LARGEST_HEADER, broken
from ..config.settings import Loaded
from ..errors import Stop, unreadable

# A header of 2,900 tensors is about 400 KB: one request nearly always brings a whole one.
FIRST_BYTES = 1 << 19
TIMEOUT = 30.0

# (file name, first byte, last byte) -> the bytes; last byte None: the whole file. Raises FileNotFoundError.
Fetch = Callable[[str, int, int | None], bytes]


def read(
    model: str, *, revision: str | None = None, token: str | None = None, endpoint: str | None = None, workers: int = 8
) -> Checkpoint:
    """config.json, quantisation config and the headers of every shard of ``model`` on the hub.

    Raises Stop: 77 when the model is gated, 66 when it does not exist or has no config.json, 69 when the hub
    cannot be reached. ``endpoint`` and ``token`` default to huggingface_hub's own (HF_ENDPOINT, HF_TOKEN).
    """
    import httpx
    from huggingface_hub import constants, get_token, hf_hub_url

    token = token or get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(headers=headers, timeout=TIMEOUT, follow_redirects=True) as client:

        def fetch(name: str, first: int, last: int | None) -> bytes:
            url = hf_hub_url(model, name, revision=revision, endpoint=endpoint or constants.ENDPOINT)
            wanted = {} if last is None else {"range": f"bytes={first}-{last}"}
            try:
                reply = client.get(url, headers=wanted)
            except httpx.HTTPError as error:
                raise Stop(
                    "hub_unavailable",
                    f"{model}: the hub cannot be reached: {error}",
                    "check the network, or set RELAUNCH_OFFLINE=on",
                ) from None
            if reply.status_code in (401, 403):
                raise Stop(
                    "hub_gated",
                    f"{model} is gated or private (HTTP {reply.status_code})",
                    "accept its terms on the hub and set HF_TOKEN",
                )
            if reply.status_code == 429:
                raise Stop("hub_rate_limited", f"{model}: the hub limits requests", "wait, or set HF_TOKEN")
            if reply.status_code == 404:
                raise FileNotFoundError(name)
            if reply.status_code >= 400:
                raise Stop(
                    "hub_unavailable", f"{model}: the hub answered {reply.status_code} for {name}", "try again later"
                )
            # A server without ranges sends the whole file: what was asked for is cut out of it.
            return (
                reply.content[first : None if last is None else last + 1] if reply.status_code == 200 else reply.content
            )

        return read_with(fetch, model=model, revision=revision, workers=workers)


def read_remote(loaded: Loaded, *, environ: Mapping[str, str]) -> Checkpoint:
    """`read` for the model of the settings, with the hub that the environment names (HF_ENDPOINT, HF_TOKEN).
    Never called offline."""
    return read(
        str(loaded.settings.model),
        revision=loaded.settings.revision,
        token=environ.get("HF_TOKEN") or None,
        endpoint=environ.get("HF_ENDPOINT") or None,
    )


def read_with(fetch: Fetch, *, model: str, revision: str | None = None, workers: int = 8) -> Checkpoint:
    """The same over any way to fetch bytes."""
    config = _json(fetch, "config.json", model)
    if config is None:
        raise unreadable(f"{model} has no config.json on the hub", "check RELAUNCH_MODEL and RELAUNCH_REVISION")
    quantization = _json(fetch, "hf_quant_config.json", model) or {}
    index = _json(fetch, "model.safetensors.index.json", model)
    named = (index or {}).get("weight_map")
    names = sorted(set(map(str, named.values()))) if isinstance(named, dict) else []
    names = names or ["model.safetensors"]
    groups = checkpoint_shards.Groups()
    with ThreadPoolExecutor(max_workers=workers) as pool:
        try:
            for name, header in zip(names, pool.map(lambda name: _header(fetch, name), names), strict=True):
                groups.add(header, name)
        except FileNotFoundError as error:
            if index is not None:
                raise Stop(
                    "weights_missing",
                    f"{model}: the index names {error}, which is not on the hub",
                    "choose another revision",
                ) from None
            return assemble(config, quantization, None, model=model, revision=revision, path=None)
    return assemble(config, quantization, groups, model=model, revision=revision, path=None)


def _header(fetch: Fetch, name: str) -> bytes:
    start = fetch(name, 0, FIRST_BYTES - 1)
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or not 2 <= length <= LARGEST_HEADER:
        raise broken(name, f"a header of {length} bytes is impossible")
    if len(start) < 8 + length:
        start += fetch(name, len(start), 7 + length)
    return start[8 : 8 + length]


def _json(fetch: Fetch, name: str, model: str) -> dict[str, Any] | None:
    try:
        data = json.loads(fetch(name, 0, None))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        raise unreadable(f"{model}: {name} on the hub is not JSON", "choose another revision") from None
    return data if isinstance(data, dict) else None
