"""The load tests that have a name: their shape, and nothing else."""

from __future__ import annotations

import msgspec

from lakebed.bench.routing import Selection
from lakebed.errors import Invalid


class Scenario(msgspec.Struct, frozen=True):
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
    seed: int = 7


SCENARIOS = {
    one.name: one
    for one in (
        Scenario("steady"),
        Scenario("wide", partitions=128, owners=1),
        Scenario("kill", brokers=3, seconds=12.0, kill_at_s=5.0, selection="least_inflight"),
        Scenario("smoke", seconds=2.0, partitions=4, lanes=8, sample_s=0.5),
    )
}


def scenario(name: str) -> Scenario:
    """Raises Invalid for one that does not exist."""
    if name not in SCENARIOS:
        raise Invalid(f"there is no scenario {name!r}", hint=f"one of: {', '.join(SCENARIOS)}")
    return SCENARIOS[name]
