"""One question to a replica's control port, and one to the resolver."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterable

from .replicas import ProbeResult, Replica, ReplicaSpec

# Both in seconds. A control port answers within milliseconds, on a box that is overloaded within a second or two.
TIMEOUT = 2.0
RESOLVE_TIMEOUT = 5.0


async def readyz(replica: Replica) -> ProbeResult:
    """The reading. Never raises for what a replica or a network does."""
    try:
        async with asyncio.timeout(TIMEOUT):
            status, body = await get(replica.address, replica.control, "/readyz")
    except TimeoutError:
        return ProbeResult(None)
    except OSError as error:
        # A network that is unplugged says so with other numbers, and is silence.
        return ProbeResult(0) if isinstance(error, ConnectionError) else ProbeResult(None)
    except ValueError:
        return ProbeResult(0, "the control port speaks no HTTP")
    return ProbeResult(status, "" if status == 200 else _reason(body))


def _reason(body: bytes) -> str:
    try:
        document = json.loads(body)
        phase, reason = document.get("phase"), document.get("reason")
    except (ValueError, AttributeError):
        return ""
    said = f"{phase}: {reason}" if reason and reason != phase else str(phase or "")
    return " ".join(said.split())[:200]


async def model(replica: Replica, api_key: str | None) -> str | None:
    """The name under which the replica serves its model; None when it does not say, to us."""
    try:
        async with asyncio.timeout(TIMEOUT):
            status, body = await get(replica.address, replica.port, "/v1/models", api_key=api_key)
        return str(json.loads(body)["data"][0]["id"]) if status == 200 else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


async def get(
    address: str, port: int, path: str, longest: int = 1 << 16, api_key: str | None = None
) -> tuple[int, bytes]:
    """Status and body of a GET over a connection of its own. Raises OSError, and ValueError for what is no HTTP."""
    reader, writer = await asyncio.open_connection(address, port, limit=longest)
    try:
        host = f"[{address}]" if ":" in address else address
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n{key}Connection: close\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        version, status = head.split(b" ", 2)[:2]
        if not version.startswith(b"HTTP/1."):
            raise ValueError("no HTTP")
        body = bytearray()
        while len(body) < longest and (more := await reader.read(longest)):
            body += more
        return int(status), bytes(body)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise ConnectionResetError(str(error)) from None
    finally:
        writer.close()


async def resolve(names: Iterable[ReplicaSpec]) -> dict[ReplicaSpec, list[str] | None]:
    """Addresses by entry, None where the resolver has none now. IPv4 where a name has both: one replica must not
    count twice."""
    names = list(names)
    found = await asyncio.gather(*(_addresses(spec.host) for spec in names))
    return dict(zip(names, found, strict=True))


async def _addresses(host: str) -> list[str] | None:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT):
            rows = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # TimeoutError is an OSError
        return None
    ipv4 = {str(row[4][0]) for row in rows if row[0] == socket.AF_INET}
    return sorted(ipv4 or {str(row[4][0]) for row in rows})
