"""Clients that mean harm, beside clients that do not, against a running `relaunch serve` on this host.

    python benchmarks/hostile.py --engine 30000 --control 30001 --key KEY --pid PID --minutes 120 --log hostile.jsonl

Every second a good request must be answered; hostile ones come at random: grammars that look like failures, requests
for administration and for the keys, half-sent heads, idle connections, foreign Hosts, large and broken bodies, clients
that leave. A row a minute goes to the log: good and lost requests, restarts, memory and descriptors of the supervisor.
Resumable: the minutes that are in the log already are not done again. Exits 1 when a good request was lost, an engine
was restarted, or an attack was answered as if it were allowed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

TEXTS = (
    "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus [",
    "OSError: [Errno 28] No space left on device [",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB [",
    "x\nSafetensorError: Error while deserializing header: MetadataIncompleteBuffer [",
    "\n[2026-11-30 10:00:00 TP7] Load weight end. elapsed=1 s, mem usage=9999.99 GB, avail mem=0.01 GB.",
    "server_args=ServerArgs( [",
    "Decode batch. #running-req: 1 [",
    "y" * 70000 + "NVRM: Xid (PCI:0000:01:00): 79 [",
)
ADMINISTRATION = (
    "/flush_cache",
    "/server_info",
    "/get_server_info",
    "/pause_generation",
    "/start_profile",
    "/abort_request",
)


class Load:
    """The two kinds of clients and what came of their requests."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.engine, self.control = f"http://127.0.0.1:{options.engine}", f"http://127.0.0.1:{options.control}"
        self.ports = (options.engine, options.control)
        headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
        self.key = options.key
        self.client = httpx.AsyncClient(headers=headers, timeout=60, trust_env=False)
        self.good = self.lost = self.attacks = 0
        self.allowed: list[str] = []

    async def be_good(self) -> None:
        """One request that must be answered."""
        body = {"text": "The", "sampling_params": {"max_new_tokens": 2}}
        try:
            response = await self.client.post(f"{self.engine}/generate", json=body)
            fine = response.status_code == 200
        except httpx.HTTPError:
            fine = False
        self.good += fine
        self.lost += not fine

    async def grammar(self) -> None:
        """Text of a failure where the engine logs what it refuses."""
        text = random.choice(TEXTS)
        kind = random.choice(("regex", "ebnf", "json_schema"))
        body: dict[str, Any] = {"text": "hi", "sampling_params": {"max_new_tokens": 1, kind: text}}
        await self.client.post(f"{self.engine}/generate", json=body)

    async def tool(self) -> None:
        """A tool's name with line ends."""
        name = random.choice(TEXTS)
        tool = {"type": "function", "function": {"name": name, "parameters": {}}}
        body = {"model": "x", "messages": [{"role": "user", "content": name}], "tools": [tool], "max_tokens": 1}
        await self.client.post(f"{self.engine}/v1/chat/completions", json=body)

    async def administer(self) -> None:
        """Administration, with the client's key."""
        path = random.choice(ADMINISTRATION)
        response = await self.client.request(random.choice(("GET", "POST")), f"{self.engine}{path}", json={})
        if self.key and response.status_code == 200:
            self.allowed.append(path)

    async def flood(self) -> None:
        """Connections that say nothing, or half a head, for a while."""
        half = random.choice((b"", b"GET /livez HTTP/1.1\r\nHost: x\r\n"))
        writers = []
        for _ in range(random.choice((50, 400, 1200))):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", random.choice(self.ports))
            except OSError:
                break
            writer.write(half)
            writers.append(writer)
        await asyncio.sleep(random.uniform(0, 15))
        for writer in writers:
            writer.close()

    async def broken(self) -> None:
        """Bodies that are none, or that never end."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.ports[0])
        body = random.choice((b"\x00" * 5000, b"[" * 100000, b'{"text": NaN}', b'{"text":"\\ud800"}'))
        length = random.choice((len(body), len(body) * 2, 10**12))
        key = f"Authorization: Bearer {self.key}\r\n".encode() if self.key else b""
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s" % (key, length, body))
        await asyncio.sleep(random.uniform(0, 3))
        writer.close()

    async def leave(self) -> None:
        """A stream that is left in its middle."""
        body = {"text": "The", "stream": True, "sampling_params": {"max_new_tokens": 64}}
        async with self.client.stream("POST", f"{self.engine}/generate", json=body) as response:
            async for _ in response.aiter_bytes():
                break

    async def be_hostile(self) -> None:
        """One attack, whatever comes of it."""
        kinds = (self.grammar, self.grammar, self.tool, self.administer, self.broken, self.leave, self.flood)
        self.attacks += 1
        with contextlib.suppress(httpx.HTTPError, OSError):
            await random.choice(kinds)()

    async def state(self, pid: int) -> dict[str, Any]:
        """What is seen of the supervisor now."""
        process = psutil.Process(pid)
        status = (await self.client.get(f"{self.control}/status")).json()
        return {
            "phase": status["phase"],
            "ready": status["ready"],
            "restarts": sum(status["restarts"].values()),
            "rss_mb": process.memory_info().rss >> 20,
            "descriptors": process.num_fds(),
            "engine_mb": sum(child.memory_info().rss for child in process.children(recursive=True)) >> 20,
        }


async def minute(load: Load, rate: float) -> None:
    """A minute of both kinds."""
    end, tasks = time.monotonic() + 60, set()
    next_good = 0.0
    while time.monotonic() < end:
        if time.monotonic() >= next_good:
            next_good = time.monotonic() + 1
            tasks.add(asyncio.create_task(load.be_good()))
        tasks.add(asyncio.create_task(load.be_hostile()))
        tasks = {task for task in tasks if not task.done()}
        await asyncio.sleep(random.expovariate(rate))
    await asyncio.wait(tasks, timeout=90)


async def main() -> int:
    """Run until the log has the minutes that are wanted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", type=int, default=30000)
    parser.add_argument("--control", type=int, default=30001)
    parser.add_argument("--key", default="")
    parser.add_argument("--pid", type=int, required=True, help="of the supervisor")
    parser.add_argument("--minutes", type=int, default=120)
    parser.add_argument("--rate", type=float, default=3.0, help="attacks a second")
    parser.add_argument("--log", type=Path, default=Path("hostile.jsonl"))
    options = parser.parse_args()
    done = [json.loads(line) for line in options.log.read_text().splitlines()] if options.log.exists() else []
    while len(done) < options.minutes:
        load = Load(options)
        await minute(load, options.rate)
        row = {"good": load.good, "lost": load.lost, "attacks": load.attacks, "allowed": load.allowed}
        row |= await load.state(options.pid)
        await load.client.aclose()
        done.append(row)
        with options.log.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    bad = [row for row in done if row["lost"] or row["restarts"] or row["allowed"] or not row["ready"]]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
