"""Which brokers a partition is sent to: owner sets by rendezvous hashing, and remaps that never leave them. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

Selection = Literal["round_robin", "least_inflight"]


class Route(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    owners: tuple[str, ...]


class Manifest(msgspec.Struct, frozen=True):
    """Computed once per run and kept: the canonical mapping."""

    seed: int
    brokers: tuple[str, ...]
    owners_per_partition: int
    routes: tuple[Route, ...]


def manifest(topics: Mapping[str, int], brokers: Sequence[str], *, owners_per_partition: int, seed: int) -> Manifest:
    """`topics` gives each topic's number of partitions. The same input gives the same manifest, always."""
    count = min(owners_per_partition, len(brokers))
    routes = [
        Route(topic, partition, owners(topic, partition, brokers, seed)[:count])
        for topic, partitions in topics.items()
        for partition in range(partitions)
    ]
    return Manifest(seed, tuple(brokers), count, tuple(routes))


def owners(topic: str, partition: int, brokers: Sequence[str], seed: int) -> tuple[str, ...]:
    """All brokers in the order in which this partition prefers them."""
    return tuple(sorted(brokers, key=lambda broker: _weight(topic, partition, broker, seed), reverse=True))


def choose(
    route: Route, turn: int, *, selection: Selection, inflight: Mapping[str, int], down: Collection[str]
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
