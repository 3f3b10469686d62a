"""The replicas as the gateway sees them: standing, relay, place in the router, what is in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..control.metrics import text
from .relay import Relay
from .replicas import Health, Replica


@dataclass
class Member:
    """``worker`` is the router's id for it, in its life number ``generation``."""

    replica: Replica
    relay: Relay
    health: Health = field(default_factory=Health)
    worker: str | None = None
    generation: int = 0
    in_flight: int = 0
    requests: int = 0
    failed_over: int = 0
    unreachable: int = 0
    unanswered: int = 0

    def opened(self, instead_of: Replica) -> None:
        """A request has begun that the router gave to ``instead_of``."""
        self.in_flight += 1
        self.requests += 1
        self.failed_over += self.replica != instead_of

    def closed(self, unanswered: bool) -> None:
        """A request is over."""
        self.in_flight -= 1
        self.unanswered += unanswered

    def serves(self, generation: int) -> bool:
        """It is ready, and the router in its present life sends requests to it."""
        return self.health.ready and self.worker is not None and self.generation == generation

    def document(self, generation: int) -> dict[str, Any]:
        """Return the row of `/replicas`."""
        return {
            "replica": str(self.replica),
            "control_port": self.replica.control,
            "ready": self.health.ready,
            "reason": self.health.reason or None,
            "in_router": self.serves(generation),
            "in_flight": self.in_flight,
            "requests": self.requests,
            "unanswered": self.unanswered,
        }


def metrics(members: Mapping[Replica, Member], *, router_up: bool, generation: int) -> bytes:
    """The gateway's own families, in Prometheus' text."""
    ready = GaugeMetricFamily("relaunch_gateway_replica_ready", "1 when the replica gets requests.", labels=["replica"])
    in_flight = GaugeMetricFamily("relaunch_gateway_in_flight_requests", "Requests under way.", labels=["replica"])
    requests = CounterMetricFamily("relaunch_gateway_requests", "Requests sent to the replica.", labels=["replica"])
    taken = CounterMetricFamily(
        "relaunch_gateway_taken_over_requests",
        "Of these, meant for another replica that could not be reached.",
        labels=["replica"],
    )
    missed = CounterMetricFamily(
        "relaunch_gateway_unreachable", "Connections that the replica did not take.", labels=["replica"]
    )
    lost = CounterMetricFamily(
        "relaunch_gateway_unanswered_requests",
        "Requests whose connection the replica ended without an answer.",
        labels=["replica"],
    )
    for replica, member in sorted(members.items()):
        name = [str(replica)]
        ready.add_metric(name, float(member.serves(generation)))
        in_flight.add_metric(name, member.in_flight)
        requests.add_metric(name, member.requests)
        taken.add_metric(name, member.failed_over)
        missed.add_metric(name, member.unreachable)
        lost.add_metric(name, member.unanswered)
    up = GaugeMetricFamily("relaunch_gateway_router_up", "1 while the router answers.", value=float(router_up))
    starts = CounterMetricFamily("relaunch_gateway_router_starts", "Starts of the router.", value=generation)
    return text([up, starts, ready, in_flight, requests, taken, missed, lost])
