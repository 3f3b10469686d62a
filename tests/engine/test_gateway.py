"""The real gateway in front of two real replicas under load: a kill costs what was in flight, a rolling restart
nothing."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from supervisor import ROOT, Supervisor, free_ports

pytestmark = [pytest.mark.engine, pytest.mark.needs("smg"), pytest.mark.timeout(900)]

CLIENTS = 4
# Texts in one request: enough work that a kill meets requests under way, little enough for two shared cores.
TEXTS = 4


@dataclass(frozen=True)
class Asked:
    """One request: seconds when it was sent and when it was over, and what came; 200, another status or an error."""

    sent: float
    over: float
    came: str


class Load:
    """Clients that ask without end, in a thread of their own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.asked: list[Asked] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        await asyncio.gather(*(self._client(random.Random(number)) for number in range(CLIENTS)))

    async def _client(self, dice: random.Random) -> None:
        async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
            while not self._stop.is_set():
                texts = [" ".join("".join(dice.choices(string.ascii_lowercase, k=6)) for _ in range(4))] * TEXTS
                sent = time.monotonic()
                try:
                    answer = await http.post(self._url, json={"model": "rehearsal", "input": texts})
                    whole = answer.status_code == 200 and len(answer.json()["data"]) == TEXTS
                    came = "200" if whole else f"{answer.status_code} {answer.text[:300]}"
                except httpx.HTTPError as error:
                    came = repr(error)
                self.asked.append(Asked(sent, time.monotonic(), came))
                await asyncio.sleep(0.05)

    def failed(self) -> list[Asked]:
        return [one for one in self.asked if one.came != "200"]


class Scene:
    """Two supervisors and the gateway before them."""

    def __init__(self, folder: Path) -> None:
        self.replicas = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            self.replicas.append(Supervisor(folder / name))
        self.port, self.control = free_ports(2)
        self.log_path = folder / "gateway.log"
        environ = {k: v for k, v in os.environ.items() if not k.startswith("RELAUNCH_")} | {
            "RELAUNCH_REPLICAS": ",".join(f"127.0.0.1:{one.port}:{one.control}" for one in self.replicas),
            "RELAUNCH_PORT": str(self.port),
            "RELAUNCH_CONTROL_PORT": str(self.control),
        }
        with open(self.log_path, "wb") as log:
            self.gateway = subprocess.Popen(
                [sys.executable, "-P", "-m", "entrypoint", "gateway"], env=environ, stdout=log, stderr=log, cwd=ROOT
            )
        self.url = f"http://127.0.0.1:{self.port}/v1/embeddings"

    def rows(self) -> dict[int, dict[str, Any]]:
        """What the gateway knows of each replica, by its engine port."""
        answer = httpx.get(f"http://127.0.0.1:{self.control}/replicas", timeout=10, trust_env=False)
        return {int(row["replica"].rpartition(":")[2]): row for row in answer.json()["replicas"]}

    def row(self, replica: Supervisor) -> dict[str, Any]:
        return self.rows()[replica.port]

    def until_in_router(self, *replicas: Supervisor) -> None:
        for replica in replicas:
            replica.until_ready()
            replica.until(lambda one=replica: self.row(one)["in_router"], 10, "in the router")  # type: ignore[misc]

    def close(self) -> None:
        self.gateway.terminate()
        for replica in self.replicas:
            replica.terminate()
        try:
            assert self.gateway.wait(60) == 0
            assert [replica.wait(90) for replica in self.replicas] == [0, 0]
        finally:
            self.gateway.kill()
            for replica in self.replicas:
                replica.close()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("gateway"))
    try:
        made.until_in_router(*made.replicas)
        yield made
    finally:
        made.close()


def report(what: str, **numbers: Any) -> None:
    print(f"\n{what}: {json.dumps(numbers)}")


def test_a_killed_replica_costs_what_was_in_flight_on_it_and_comes_back(scene: Scene) -> None:
    victim, other = scene.replicas
    lost_before = {port: row["unanswered"] for port, row in scene.rows().items()}
    with Load(scene.url) as load:
        victim.until(lambda: len(load.asked) > 20 and scene.row(victim)["in_flight"] > 0, 180, "load on the victim")
        main = victim.engine("main")
        killed = time.monotonic()
        main.kill()
        psutil.wait_procs([main], timeout=10)
        gone = time.monotonic()
        victim.until(lambda: not scene.row(victim)["in_router"], 5, "out of the router")
        out = time.monotonic()
        scene.until_in_router(victim)
        back = time.monotonic()
        served = scene.row(victim)["requests"]
        victim.until(lambda: scene.row(victim)["requests"] >= served + 10, 180, "serving again")
    failed = load.failed()
    lost = {port: row["unanswered"] - lost_before[port] for port, row in scene.rows().items()}
    report(
        "kill",
        requests=len(load.asked),
        failed=len(failed),
        sent_before_the_kill=sum(one.sent < killed for one in failed),
        ms_to_be_gone=round((gone - killed) * 1e3),
        ms_out_of_router=round((out - killed) * 1e3),
        s_back=round(back - killed, 1),
        after_it=sum(one.sent > gone for one in load.asked),
    )
    assert not [one for one in failed if one.sent > gone], "a request that began after the end of the replica failed"
    assert not [one for one in failed if one.over < killed], "a request failed before"
    # Each was on the victim: what it left without an answer, and nothing on the other.
    assert lost == {victim.port: len(failed), other.port: 0}
    assert len(failed) <= CLIENTS
    assert [one["cause"] for one in victim.history()["post_mortems"]] == ["killed"]


def test_a_rolling_restart_costs_no_request(scene: Scene) -> None:
    took = []
    with Load(scene.url) as load:
        for replica in scene.replicas:
            scene.until_in_router(*scene.replicas)
            began, boots = time.monotonic(), len(replica.history()["boots"])
            replica.process.send_signal(signal.SIGHUP)
            replica.until(lambda one=replica: not scene.row(one)["in_router"], 5, "out")  # type: ignore[misc]
            scene.until_in_router(replica)
            assert len(replica.history()["boots"]) == boots + 1
            took.append(round(time.monotonic() - began, 1))
    report("rolling restart", requests=len(load.asked), failed=len(load.failed()), seconds=took)
    assert not load.failed()
    assert len(load.asked) > 50
