"""What the gateway adds: time a request, and cores for streamed tokens, in front of replicas that cost nothing.

    python -P benchmarks/gateway_cost.py [--seconds 4] [--streams 64 256]

The replicas are two processes that answer at once, or stream 50 chunks a second; everything runs on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

CHUNK = b'data: {"id":"x","object":"text_completion","choices":[{"index":0,"text":" word","finish_reason":null}]}\n\n'
ANSWER = b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[1.0]}],"model":"m","usage":{}}'
CHUNKS, PAUSE = 200, 0.02


async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request a connection: a JSON answer, or a stream when it asks for one."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        body = await reader.readexactly(length)
        if b'"stream":true' in body:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(CHUNKS):
                writer.write(b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK))
                await asyncio.sleep(PAUSE)
            writer.write(b"0\r\n\r\n")
        else:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)
            writer.write(head + ANSWER)
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    writer.close()


async def replica(port: int) -> None:
    await asyncio.start_server(engine, "127.0.0.1", port)
    await asyncio.start_server(engine, "127.0.0.1", port + 1)
    await asyncio.Event().wait()


async def ask(port: int, path: str, body: bytes) -> tuple[bytes, float, int]:
    """(status, seconds to the first byte, chunks of a stream)"""
    began, first, status, chunks = time.monotonic(), 0.0, b"", 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n%s" % (len(body), body))
    while data := await reader.read(1 << 16):
        first, status = first or time.monotonic() - began, status or data[9:12]
        chunks += data.count(b"data: ")
    writer.close()
    return status, first, chunks


def cores(processes: Sequence[psutil.Process]) -> list[float]:
    return [sum(process.cpu_times()[:2]) for process in processes]


def show(what: str, took: float, rows: list[tuple[bytes, float, int]], used: list[float]) -> None:
    firsts = sorted(row[1] for row in rows)
    print(
        f"{what:28} {len(rows):6} requests, {sum(row[0] != b'200' for row in rows)} not 200, "
        f"first byte {statistics.median(firsts) * 1e3:.1f} ms (p99 {firsts[int(len(firsts) * 0.99)] * 1e3:.1f}), "
        f"{len(rows) / took:.0f} requests/s, {sum(row[2] for row in rows) / took:.0f} chunks/s, "
        f"cores: {', '.join(f'{used / took:.2f}' for used in used) or '-'}"
    )


async def measure(what: str, port: int, clients: int, seconds: float, watched: list[psutil.Process]) -> None:
    """``seconds`` 0: one stream a client; else as many short requests as fit."""
    rows: list[tuple[bytes, float, int]] = []
    before, began = cores(watched), time.monotonic()

    async def client(number: int) -> None:
        if not seconds:
            rows.append(await ask(port, "/v1/completions", b'{"model":"m","prompt":"%d","stream":true}' % number))
            return
        count = 0
        while time.monotonic() - began < seconds:
            count += 1
            rows.append(await ask(port, "/v1/embeddings", b'{"model":"m","input":"%d %d"}' % (number * 7919, count)))

    await asyncio.gather(*(client(number) for number in range(clients)))
    took = time.monotonic() - began
    show(what, took, rows, [now - was for now, was in zip(cores(watched), before, strict=True)])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def main(seconds: float, streams: list[int]) -> None:
    ports = [free_port() for _ in range(2)]
    gateway_port, control = free_port(), free_port()
    own = [sys.executable, "-P", __file__, "--replica"]
    started = [subprocess.Popen([*own, str(port)]) for port in ports]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RELAUNCH_")} | {
        "RELAUNCH_REPLICAS": ",".join(f"127.0.0.1:{port}" for port in ports),
        "RELAUNCH_PORT": str(gateway_port),
        "RELAUNCH_CONTROL_PORT": str(control),
    }
    gateway = subprocess.Popen([sys.executable, "-P", "-m", "entrypoint", "gateway"], env=environ)
    try:
        while True:
            try:
                status, _, _ = await ask(gateway_port, "/v1/embeddings", b'{"model":"m","input":"x"}')
                if status == b"200":
                    break
            except OSError:
                pass
            await asyncio.sleep(0.2)
        ours = psutil.Process(gateway.pid)
        both = [ours, *ours.children()]
        print(f"load average {os.getloadavg()[0]:.1f}; cores: the gateway's own process, the router's")
        for clients in (1, 16):
            await measure(f"direct, {clients} at a time", ports[0], clients, seconds, [])
            await measure(f"gateway, {clients} at a time", gateway_port, clients, seconds, both)
        for count in streams:
            await measure(f"direct, {count} streams", ports[0], count, 0.0, [])
            await measure(f"gateway, {count} streams", gateway_port, count, 0.0, both)
        before = cores(both)
        await asyncio.sleep(10)
        print("idle:", ", ".join(f"{(now - was) / 10:.3f} cores" for now, was in zip(cores(both), before, strict=True)))
        print("memory:", ", ".join(f"{process.memory_info().rss >> 20} MiB" for process in both))
    finally:
        for process in (gateway, *started):
            process.terminate()
            process.wait(20)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--streams", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import uvloop

    uvloop.run(replica(arguments.replica) if arguments.replica else main(arguments.seconds, arguments.streams))
