"""A replica as the gateway sees it: an engine port that counts what reaches it, a control port that says ready."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from supervisor import free_ports


@dataclass
class Seen:
    """One request that reached the engine port."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class FakeReplica:
    """``mode`` of the engine port: ok, die (reads a request and closes), stream-die (dies in the middle of a
    stream), flood (streams without an end, as fast as it is read), error (answers 500). ``delay`` in seconds before an
    answer."""

    mode: str = "ok"
    ready: bool = True
    delay: float = 0.0
    key: str | None = None
    seen: list[Seen] = field(default_factory=list)
    flooded: int = 0  # bytes that were taken of it

    async def open(self) -> None:
        self.port, self.control = free_ports(2)
        await self.open_engine()
        self._control = await asyncio.start_server(self._answer_control, "127.0.0.1", self.control)

    async def open_engine(self) -> None:
        self._engine = await asyncio.start_server(self._answer_engine, "127.0.0.1", self.port)

    def close_engine(self) -> None:
        self._engine.close()

    def close(self) -> None:
        self._engine.close()
        self._control.close()

    @property
    def named(self) -> str:
        return f"127.0.0.1:{self.port}:{self.control}"

    def answered(self, *words: str) -> int:
        """How many requests with one of these inputs, or any, were seen on a route that makes an engine work."""
        return sum(
            s.path.startswith("/v1/") and s.path != "/v1/models" and (not words or s.body["input"] in words)
            for s in self.seen
        )

    async def _answer_control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._read(reader)
        status = "200 OK" if self.ready else "503 Service Unavailable"
        document = {"ready": self.ready, "phase": "READY" if self.ready else "DRAINING", "reason": None}
        await self._write(writer, status, document)

    async def _answer_engine(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while seen := await self._read(reader):
                self.seen.append(seen)
                if self.key and seen.headers.get("authorization") != f"Bearer {self.key}":
                    await self._write(writer, "401 Unauthorized", {"error": "Unauthorized"})
                    return
                if seen.path == "/v1/models":
                    await self._write(writer, "200 OK", {"data": [{"id": "fake"}]})
                    return
                await asyncio.sleep(self.delay)
                if self.mode == "die":
                    writer.transport.abort()
                    return
                if self.mode == "error":
                    await self._write(writer, "500 Internal Server Error", {"error": "broken"})
                    return
                if seen.body.get("stream"):
                    await self._stream(writer)
                    return
                row = {"object": "embedding", "index": 0, "embedding": [float(self.port)]}
                await self._write(
                    writer,
                    "200 OK",
                    {
                        "object": "list",
                        "data": [row],
                        "model": "fake",
                        "usage": {"prompt_tokens": 1, "total_tokens": 1},
                    },
                )
                return

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        line = b"data: " + b"x" * (1 << 16) + b"\n\n"
        while self.mode == "flood":
            writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            await writer.drain()
            self.flooded += len(line)
        for number in range(3):
            line = f"data: {number}\n\n".encode()
            writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.01)
            if self.mode == "stream-die":
                writer.close()
                return
        writer.write(b"0\r\n\r\n")
        writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Seen | None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        first, *rows = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (row.partition(":") for row in rows)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Seen(first.split()[1], headers, json.loads(body) if body else {})

    async def _write(self, writer: asyncio.StreamWriter, status: str, document: Any) -> None:
        body = json.dumps(document).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()
