"""The plan of a load test: named scenarios, and the brokers of each partition. Pure.

Owner sets are chosen by rendezvous hashing; a remap stays inside the owner set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from lakebed.core.errors import Invalid

Selection = Literal["round_robin", "least_inflight"]


class PartitionRoute(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    owners: tuple[str, ...]


class RoutingManifest(msgspec.Struct, frozen=True):
    """The mapping of partitions to brokers, computed once per run."""

    seed: int
    brokers: tuple[str, ...]
    owners_per_partition: int
    routes: tuple[PartitionRoute, ...]


def manifest(
    topics: Mapping[str, int], brokers: Sequence[str], *, owners_per_partition: int, seed: int
) -> RoutingManifest:
    """`topics` gives each topic's number of partitions. The same input gives the same manifest, always."""
    count = min(owners_per_partition, len(brokers))
    routes = [
        PartitionRoute(topic, partition, owners(topic, partition, brokers, seed)[:count])
        for topic, partitions in topics.items()
        for partition in range(partitions)
    ]
    return RoutingManifest(seed, tuple(brokers), count, tuple(routes))


def owners(topic: str, partition: int, brokers: Sequence[str], seed: int) -> tuple[str, ...]:
    """All brokers in the order in which this partition prefers them."""
    return tuple(sorted(brokers, key=lambda broker: _weight(topic, partition, broker, seed), reverse=True))


def choose(
    route: PartitionRoute, turn: int, *, selection: Selection, inflight: Mapping[str, int], down: Collection[str]
) -> str | None:
    """A broker of the owner set that is not down; None when the whole set is. Never one from outside the set."""
    alive = [broker for broker in route.owners if broker not in down]
    if not alive:
        return None
    if selection == "least_inflight":
        return min(alive, key=lambda broker: (inflight.get(broker, 0), alive.index(broker)))
    return alive[turn % len(alive)]


def _weight(topic: str, partition: int, broker: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{topic}\0{partition}\0{broker}\0{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class LoadTestScenario(msgspec.Struct, frozen=True):
    name: str
    brokers: int = 2
    topics: int = 2
    partitions: int = 16
    owners: int = 2
    selection: Selection = "round_robin"
    lanes: int = 32
    records_per_request: int = 50
    record_bytes: int = 1024
    seconds: float = 10.0
    sample_s: float = 1.0
    kill_at_s: float = 0.0  # one broker is killed with -9 at this time; 0: none is
    consumers: int = 0  # lanes that read all that is written, each some of the partitions
    compactors: int = 0  # worker processes of the log
    compact_every_s: float = 5.0
    compact_min_bytes: int = 4 * 1024 * 1024
    kafka_clients: int = 0  # librdkafka producers, each to a topic of its own
    kafka_consumers: int = 0  # librdkafka consumers, one group that reads those topics
    seed: int = 7


SCENARIOS = {
    one.name: one
    for one in (
        LoadTestScenario("steady"),
        LoadTestScenario("wide", partitions=128, owners=1),
        LoadTestScenario("kill", brokers=3, seconds=12.0, kill_at_s=5.0, selection="least_inflight"),
        LoadTestScenario("mixed", consumers=8, compactors=1, kafka_clients=2, kafka_consumers=2),
        LoadTestScenario("smoke", seconds=2.0, partitions=4, lanes=8, sample_s=0.1),
        LoadTestScenario(
            "mixed-smoke",
            seconds=2.0,
            partitions=4,
            lanes=8,
            sample_s=0.1,
            consumers=2,
            compactors=1,
            compact_every_s=0.3,
            compact_min_bytes=64 * 1024,
            kafka_clients=1,
            kafka_consumers=2,
        ),
    )
}


def scenario(name: str) -> LoadTestScenario:
    """Raises Invalid for one that does not exist."""
    if name not in SCENARIOS:
        raise Invalid(f"there is no scenario {name!r}", hint=f"one of: {', '.join(SCENARIOS)}")
    return SCENARIOS[name]
