"""The load test's routing: rendezvous owner sets, and remaps that stay inside them."""

from __future__ import annotations

import msgspec

from lakebed.log.loadtest import plan
from lakebed.log.loadtest.plan import LoadTestScenario, PartitionRoute
from lakebed.log.loadtest.summary import LoadTestSummary, OtherLoad, page, quantiles, totals, warnings_of

BROKERS = ["b0", "b1", "b2", "b3"]


def test_the_manifest_is_the_same_for_the_same_seed_and_spreads_partitions() -> None:
    """Every partition has its owners; every broker has its share."""
    one = plan.manifest({"t": 400}, BROKERS, owners_per_partition=2, seed=7)

    assert one == plan.manifest({"t": 400}, BROKERS, owners_per_partition=2, seed=7)
    assert one != plan.manifest({"t": 400}, BROKERS, owners_per_partition=2, seed=8)
    assert all(len(set(route.owners)) == 2 for route in one.routes)
    shares = [sum(broker in route.owners for route in one.routes) for broker in BROKERS]
    assert min(shares) > 140


def test_a_new_broker_takes_partitions_only_for_itself() -> None:
    """Rendezvous: nobody else's partitions move between the old brokers."""
    before = {p: plan.owners("t", p, BROKERS, 7)[0] for p in range(300)}
    after = {p: plan.owners("t", p, [*BROKERS, "b4"], 7)[0] for p in range(300)}

    moved = [p for p in before if before[p] != after[p]]
    assert 30 < len(moved) < 100
    assert {after[p] for p in moved} == {"b4"}


def test_a_remap_never_leaves_the_owner_set() -> None:
    """With one owner down the others are chosen; with all down, nobody is."""
    route = PartitionRoute("t", 0, ("b1", "b3"))

    def choose(turn: int, down: set[str], selection: plan.Selection = "round_robin") -> str | None:
        return plan.choose(route, turn, selection=selection, inflight={"b1": 5, "b3": 2}, down=down)

    assert ["b1", "b3", "b1"] == [choose(turn, set()) for turn in range(3)]
    assert ["b3", "b3"] == [choose(turn, {"b1"}) for turn in range(2)]
    assert choose(0, {"b1", "b3"}) is None
    assert choose(0, set(), "least_inflight") == "b3"


def test_what_does_not_add_up_is_a_warning() -> None:
    """Fewer or more records than clients know of, brokers without samples, a generator at its limit."""
    steady = LoadTestScenario("steady", brokers=2, records_per_request=10)
    both: dict[str, object] = {"b0": {}, "b1": {}}

    assert warnings_of(steady, 100, 0, 100, both, 0.1) == []
    assert "100 acknowledged" in warnings_of(steady, 100, 0, 90, both, 0.1)[0]
    assert warnings_of(steady, 100, 1, 110, both, 0.1) == []
    assert "doubtful" in warnings_of(steady, 100, 1, 120, both, 0.1)[0]
    assert "sampled" in warnings_of(steady, 100, 0, 100, {"b0": {}}, 0.1)[0]
    mixed = msgspec.structs.replace(steady, compactors=1)
    assert "only 2 of 3" in warnings_of(mixed, 100, 0, 100, both, 0.1)[0]
    assert "bottleneck" in warnings_of(steady, 100, 0, 100, both, 0.95)[0]


def test_what_kafka_clients_lost_is_a_warning() -> None:
    """Anomalies of their history, and records that their group did not read."""
    mixed = LoadTestScenario("mixed", brokers=1, kafka_clients=1, kafka_consumers=1)

    def warned(others: OtherLoad) -> list[str]:
        return warnings_of(mixed, 100, 0, 110, {"b0": {}}, 0.1, others=others)

    assert [] == warned(OtherLoad(kafka_records=10, kafka_consumed=10))
    assert ["Kafka consumers read 9 of 10 acknowledged records"] == warned(OtherLoad(10, kafka_consumed=9))
    assert "duplicate in t/0" in warned(OtherLoad(10, kafka_consumed=10, kafka_anomalies=["duplicate in t/0"]))[0]


def test_brokers_totals_are_summed_and_what_is_stored_is_not() -> None:
    """Requests and their cost add up over brokers; stored bytes are the same for all, so the largest counts."""
    one = {
        "lakebed_log_records_total": [
            {"labels": {"direction": "in"}, "value": 30.0},
            {"labels": {"direction": "out"}, "value": 7.0},
        ],
        "lakebed_log_blobs_total": 2.0,
        "lakebed_log_compacted_blobs_total": 3.0,
        "lakebed_log_compacted_bytes_total": 4.0,
        "lakebed_log_s3_requests_total": [
            {"labels": {"op": "put"}, "value": 2.0},
            {"labels": {"op": "get"}, "value": 1.0},
        ],
        "lakebed_log_s3_request_cost_dollars": 0.5,
        "lakebed_log_s3_stored_bytes": 100.0,
    }

    both = totals({"b0": one, "b1": {**one, "lakebed_log_s3_stored_bytes": 90.0}})

    assert (60, 4, 6) == (both.records, both.blobs, both.s3_requests)
    assert (6, 8) == (both.compacted_blobs, both.compacted_bytes)
    assert (1.0, 100) == (both.s3_request_dollars, both.s3_stored_bytes)


def test_the_page_shows_rates_latencies_and_what_does_not_add_up() -> None:
    """A self-contained page: plots over time with the kill marked, the distribution, the routing, the warnings."""
    kill = LoadTestScenario("kill", brokers=2, partitions=4)
    manifest = plan.manifest({"t": 4}, BROKERS[:2], owners_per_partition=2, seed=7)
    client = [
        {"at_s": at, "acknowledged": 100 * at, "cpu_s": 0.1 * at, "latency_ms": {"p50": 2.0, "p99": 9.0, "max": 9.0}}
        for at in map(float, range(12))
    ]
    brokers = [
        {"broker": name, "at_s": at, "records": 50 * at, "process": {"cpu_s": at, "rss_bytes": 1}}
        for at in map(float, range(12))
        for name in BROKERS[:2]
    ]
    summary = LoadTestSummary(
        scenario="kill",
        folder="somewhere",
        acknowledged_records=200,
        accepted_records=190,
        records_per_s=100.0,
        latency_ms=quantiles([1.0, 2.0, 9.0]),
        remaps=1,
        generator_cpu=0.1,
        warnings=["brokers took <190> records"],
        brokers=totals({}),
        artifacts={},
    )

    shown = page(
        kill,
        summary,
        manifest,
        client=client,
        brokers=brokers,
        latencies_ms=[1.0, 2.0, 9.0] * 4,
        events=[{"at_s": 1.0, "killed": "b0"}],
    )

    assert (5, 0) == (shown.count('<div class="chart"'), shown.count('<table class="bars"'))
    assert 5 == shown.count('</figcaption>\n<p class="note">')  # each says what to see
    assert "100 records/s were acknowledged" in shown and "Partitions of each broker: " in shown
    assert "b0 killed" in shown
    assert "brokers took &lt;190&gt; records" in shown
    assert "default-src &#39;none&#39;" in shown
    assert "<script src" not in shown
    assert "<link" not in shown
