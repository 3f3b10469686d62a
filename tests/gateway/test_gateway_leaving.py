"""A replica that leaves its name, and a router that does not do what it is told at once."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterable

import httpx
import pytest

from entrypoint.config import loading
from entrypoint.gateway import gateway as module
from entrypoint.gateway import probe, router
from entrypoint.gateway.gateway import Gateway
from entrypoint.gateway.replicas import ProbeResult, Replica, ReplicaSpec
from entrypoint.supervisor.logs import Log


class Listing:
    """What the gateway asks of the router. ``refuses``: so many removals fail; ``gone``: its client is closed."""

    up, generation, reason = True, 1, ""

    def __init__(self) -> None:
        self.urls: dict[str, str] = {}
        self.refuses, self.gone = 0, False
        self.adding = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def add(self, url: str, model: str | None) -> str:
        if self.gone:
            raise RuntimeError("Cannot send a request, as the client has been closed.")
        self.urls[url] = url
        self.adding.set()
        await self.go_on.wait()
        return url

    async def remove(self, worker: str) -> None:
        if self.refuses:
            self.refuses -= 1
            raise httpx.ReadTimeout("")
        del self.urls[worker]


class Town:
    """A gateway whose name has the ``addresses`` given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def resolve(names: Iterable[ReplicaSpec]) -> dict[ReplicaSpec, list[str] | None]:
            return {name: list(self.addresses) for name in names}

        async def readyz(replica: Replica) -> ProbeResult:
            return ProbeResult(200)

        async def model(replica: Replica, key: str | None) -> str | None:
            return "m"

        monkeypatch.setattr(module, "ASK_EVERY", 0.01)
        for name, fake in (("resolve", resolve), ("readyz", readyz), ("model", model)):
            monkeypatch.setattr(probe, name, fake)
        self.addresses = ["127.0.0.1"]
        self.stream = io.StringIO()
        loaded = loading.load({"RELAUNCH_REPLICAS": "box:1:2", "RELAUNCH_MODEL": "m"})
        self.gateway = Gateway(loaded, {}, Log(stream=self.stream))
        self.router = self.gateway._router = Listing()  # type: ignore[assignment]

    async def close(self) -> None:
        await asyncio.sleep(0)  # what was never begun cannot be ended without a warning
        tending = list(self.gateway._probing)
        for task in tending:
            task.cancel()
        await asyncio.gather(*tending, return_exceptions=True)
        for member in self.gateway._members.values():
            member.relay.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_who_leaves_the_name_leaves_the_router_although_it_refuses_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    town = Town(monkeypatch)
    await town.gateway._resolve()
    await until(lambda: bool(town.router.urls))
    town.addresses.clear()
    town.router.refuses = 2
    await town.gateway._resolve()
    await until(lambda: not town.gateway._probing)
    assert not town.router.urls and not town.gateway._members
    await town.close()


async def test_who_leaves_while_it_is_taken_in_leaves_the_router_too(monkeypatch: pytest.MonkeyPatch) -> None:
    town = Town(monkeypatch)
    town.router.go_on.clear()
    await town.gateway._resolve()
    await town.router.adding.wait()
    town.addresses.clear()
    await town.gateway._resolve()
    town.router.go_on.set()
    await until(lambda: not town.gateway._probing)
    assert not town.router.urls
    await town.close()


async def test_a_request_from_before_does_not_count_for_who_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    town = Town(monkeypatch)
    await town.gateway._resolve()
    (replica,) = town.gateway._members
    over = town.gateway.opened(replica, replica)
    for addresses in ([], ["127.0.0.1"]):
        town.addresses[:] = addresses
        await town.gateway._resolve()
    again = town.gateway.opened(replica, replica)
    over(False)
    assert town.gateway._members[replica].in_flight == 1
    again(True)
    assert (town.gateway._members[replica].in_flight, town.gateway._members[replica].unanswered) == (0, 1)
    await town.close()


async def test_a_router_that_ends_while_it_is_asked_does_not_end_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    town = Town(monkeypatch)
    town.router.gone = True
    await town.gateway._resolve()
    await asyncio.sleep(0.05)
    town.router.gone = False
    await until(lambda: bool(town.router.urls))
    assert not town.gateway._failed
    await town.close()


async def test_a_worker_that_is_not_taken_in_within_its_time_is_taken_out_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path))
        return httpx.Response(200, json={"worker_id": "w", "is_healthy": False})

    monkeypatch.setattr(router, "ANSWER_TIMEOUT", 0.05)
    own = router.Router(loading.load({"RELAUNCH_MODEL": "m"}).settings, {}, Log(stream=io.StringIO()))
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://r") as own._http:
        with pytest.raises(TimeoutError):
            await own.add("http://127.0.0.1:1", "m")
    assert asked[0] == ("POST", "/workers") and asked[-1] == ("DELETE", "/workers/w")
