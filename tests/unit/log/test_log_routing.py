"""The load test's routing: rendezvous owner sets, and remaps that stay inside them."""

from __future__ import annotations

from lakebed.bench import routing
from lakebed.bench.loadtest_summary import warnings_of
from lakebed.bench.routing import Route
from lakebed.bench.scenarios import Scenario

BROKERS = ["b0", "b1", "b2", "b3"]


def test_the_manifest_is_the_same_for_the_same_seed_and_spreads_partitions() -> None:
    """Every partition has its owners; every broker has its share."""
    one = routing.manifest({"t": 400}, BROKERS, owners_per_partition=2, seed=7)

    assert one == routing.manifest({"t": 400}, BROKERS, owners_per_partition=2, seed=7)
    assert one != routing.manifest({"t": 400}, BROKERS, owners_per_partition=2, seed=8)
    assert all(len(set(route.owners)) == 2 for route in one.routes)
    shares = [sum(broker in route.owners for route in one.routes) for broker in BROKERS]
    assert min(shares) > 140


def test_a_new_broker_takes_partitions_only_for_itself() -> None:
    """Rendezvous: nobody else's partitions move between the old brokers."""
    before = {p: routing.owners("t", p, BROKERS, 7)[0] for p in range(300)}
    after = {p: routing.owners("t", p, [*BROKERS, "b4"], 7)[0] for p in range(300)}

    moved = [p for p in before if before[p] != after[p]]
    assert 30 < len(moved) < 100
    assert {after[p] for p in moved} == {"b4"}


def test_a_remap_never_leaves_the_owner_set() -> None:
    """With one owner down the others are chosen; with all down, nobody is."""
    route = Route("t", 0, ("b1", "b3"))

    def choose(turn: int, down: set[str], selection: routing.Selection = "round_robin") -> str | None:
        return routing.choose(route, turn, selection=selection, inflight={"b1": 5, "b3": 2}, down=down)

    assert ["b1", "b3", "b1"] == [choose(turn, set()) for turn in range(3)]
    assert ["b3", "b3"] == [choose(turn, {"b1"}) for turn in range(2)]
    assert choose(0, {"b1", "b3"}) is None
    assert choose(0, set(), "least_inflight") == "b3"


def test_what_does_not_add_up_is_a_warning() -> None:
    """Fewer or more records than clients know of, brokers without samples, a generator at its limit."""
    steady = Scenario("steady", brokers=2, records_per_request=10)
    both: dict[str, object] = {"b0": {}, "b1": {}}

    assert warnings_of(steady, 100, 0, 100, both, 0.1) == []
    assert "acknowledged 100" in warnings_of(steady, 100, 0, 90, both, 0.1)[0]
    assert warnings_of(steady, 100, 1, 110, both, 0.1) == []
    assert "doubtful" in warnings_of(steady, 100, 1, 120, both, 0.1)[0]
    assert "sampled" in warnings_of(steady, 100, 0, 100, {"b0": {}}, 0.1)[0]
    assert "bottleneck" in warnings_of(steady, 100, 0, 100, both, 0.95)[0]
