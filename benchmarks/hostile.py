"""Clients that mean harm, beside clients that do not, against a running `relaunch serve` and its gateway on this host.

    python benchmarks/hostile.py --engine 30000 --control 30001 --key KEY --pid PID \\
        --gateway 30200 --gateway-control 30201 --gateway-pid PID --minutes 120 --log hostile.jsonl

Every second a good request must be answered, by the engine and by the gateway in turn; hostile ones come at random:
grammars that look like failures, requests for administration and for the keys, paths that lead out of their folder,
bodies without a key, half-sent heads, idle connections, foreign Hosts, large and broken bodies, clients that leave and
clients that do not read. A row a minute goes to the log: good and lost requests, restarts, memory and descriptors of
the supervisor, and memory of the gateway with its router. Without ``--gateway`` the gateway is left out.
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


TRAVERSALS = ("{}", "/v1/responses/..%2f..{}%3f", "/v1/responses/..%2f..{}", "/v1/../{}", "//{}")


class Load:
    """The two kinds of clients and what came of their requests."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.doors = [options.engine, *([options.gateway] if options.gateway else [])]
        self.control = f"http://127.0.0.1:{options.control}"
        self.ports = (*self.doors, options.control, *([options.gateway_control] if options.gateway else []))
        headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
        self.key, self.gateway = options.key, options.gateway
        self.client = httpx.AsyncClient(headers=headers, timeout=options.timeout, trust_env=False)
        self.good = self.lost = self.attacks = 0
        self.allowed: list[str] = []
        self.problems: list[str] = []

    @property
    def door(self) -> str:
        """Return the address of the engine, or of the gateway, at random."""
        return f"http://127.0.0.1:{random.choice(self.doors)}"

    async def be_good(self) -> None:
        """One request that must be answered."""
        body = {"text": "The", "sampling_params": {"max_new_tokens": 2}}
        door = self.doors[(self.good + self.lost) % len(self.doors)]
        try:
            response = await self.client.post(f"http://127.0.0.1:{door}/generate", json=body)
            fine = response.status_code == 200
            problem = f"{response.status_code} {response.text[:200]}"
        except httpx.HTTPError as error:
            fine, problem = False, repr(error)
        if not fine:
            self.problems.append(f"{'engine' if door == self.doors[0] else 'gateway'}: {problem}")
        self.good += fine
        self.lost += not fine

    async def grammar(self) -> None:
        """Text of a failure where the engine logs what it refuses."""
        text = random.choice(TEXTS)
        kind = random.choice(("regex", "ebnf", "json_schema"))
        body: dict[str, Any] = {"text": "hi", "sampling_params": {"max_new_tokens": 1, kind: text}}
        await self.client.post(f"{self.door}/generate", json=body)

    async def tool(self) -> None:
        """A tool's name with line ends."""
        name = random.choice(TEXTS)
        tool = {"type": "function", "function": {"name": name, "parameters": {}}}
        body = {"model": "x", "messages": [{"role": "user", "content": name}], "tools": [tool], "max_tokens": 1}
        await self.client.post(f"{self.door}/v1/chat/completions", json=body)

    async def administer(self) -> None:
        """Administration, with the client's key."""
        path = random.choice(TRAVERSALS).format(random.choice(ADMINISTRATION))
        response = await self.client.request(random.choice(("GET", "POST")), f"{self.door}{path}", json={})
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
        _, writer = await asyncio.open_connection("127.0.0.1", random.choice(self.doors))
        body = random.choice((b"\x00" * 5000, b"[" * 100000, b'{"text": NaN}', b'{"text":"\\ud800"}'))
        length = random.choice((len(body), len(body) * 2, 10**12))
        key = f"Authorization: Bearer {self.key}\r\n".encode() if self.key else b""
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s" % (key, length, body))
        await asyncio.sleep(random.uniform(0, 3))
        writer.close()

    async def leave(self) -> None:
        """A stream that is left in its middle."""
        body = {"text": "The", "stream": True, "sampling_params": {"max_new_tokens": 64}}
        async with self.client.stream("POST", f"{self.door}/generate", json=body) as response:
            async for _ in response.aiter_bytes():
                break

    async def deaf(self) -> None:
        """A stream that nobody reads."""
        _, writer = await asyncio.open_connection("127.0.0.1", random.choice(self.doors), limit=1 << 12)
        body = {"text": "The", "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        data = json.dumps(body).encode()
        key = f"Authorization: Bearer {self.key}\r\n".encode() if self.key else b""
        head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n"
        writer.write(head % (key, len(data)) + data)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(random.uniform(1, 10))
        writer.transport.abort()

    async def heavy(self) -> None:
        """Fifty megabytes without a key, announced or in chunks."""
        reader, writer = await asyncio.open_connection("127.0.0.1", random.choice(self.doors))
        chunked = random.random() < 0.5
        framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 50000000"
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n\r\n")
        piece = b"x" * 1_000_000
        try:
            for _ in range(50):
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
                await asyncio.wait_for(writer.drain(), 5)
            status = (await asyncio.wait_for(reader.readline(), 20)).split()[1:2]
            if self.key and status == [b"200"]:
                self.allowed.append("a body without a key")
        finally:
            writer.transport.abort()

    async def be_hostile(self) -> None:
        """One attack, whatever comes of it."""
        often = (self.grammar, self.administer)
        kinds = (*often, *often, self.tool, self.broken, self.leave, self.flood, self.deaf, self.heavy)
        self.attacks += 1
        with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError):
            await random.choice(kinds)()

    async def state(self, pid: int, gateway_pid: int | None) -> dict[str, Any]:
        """What is seen of the supervisor and of the gateway now."""
        process = psutil.Process(pid)
        seen: dict[str, Any] = {}
        if gateway_pid:
            gateway = psutil.Process(gateway_pid)
            (router,) = gateway.children()
            seen = {
                "gateway_mb": gateway.memory_info().rss >> 20,
                "gateway_descriptors": gateway.num_fds(),
                "router": router.pid,
                "router_mb": router.memory_info().rss >> 20,
                "router_descriptors": router.num_fds(),
            }
        status = (await self.client.get(f"{self.control}/status")).json()
        return seen | {
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
    await asyncio.wait(tasks, timeout=load.client.timeout.read)


async def main() -> int:
    """Run until the log has the minutes that are wanted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", type=int, default=30000)
    parser.add_argument("--control", type=int, default=30001)
    parser.add_argument("--key", default="")
    parser.add_argument("--gateway", type=int, help="port of a gateway in front of that engine")
    parser.add_argument("--gateway-control", type=int, default=30201)
    parser.add_argument("--gateway-pid", type=int)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for a good request")
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
        row |= {"problems": load.problems, **await load.state(options.pid, options.gateway_pid)}
        await load.client.aclose()
        done.append(row)
        with options.log.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    bad = [row for row in done if row["lost"] or row["restarts"] or row["allowed"] or not row["ready"]]
    return 1 if bad or len({row.get("router") for row in done}) > 1 else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
