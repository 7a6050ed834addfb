"""A sample's own `agent_id` label never replaces the identity of the agent that sent it, wherever samples are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lakebed.batches.codec.frame import decode
from lakebed.batches.feed import BatchesFeed
from lakebed.batches.matchers import Selector, parse, query_labels
from lakebed.batches.model import Sample
from lakebed.batches.query import Querier, QueryResponse
from lakebed.batches.window_query import RollupQuerier, RollupResponse
from lakebed.core.clock import ManualClock
from lakebed.core.feed import FeedFilter, Limit
from lakebed.store.memory import MemoryStore
from support.batches_gateway import collector
from support.rollup_fixtures import accept, frame, make_roller, make_sources
from support.runtimes import runtime_on

HOUR_NS = 1_760_000_400_000_000_000  # a full hour
SECOND_NS = 10**9
NOW_NS = HOUR_NS + 3500 * SECOND_NS
END_NS = HOUR_NS + 3600 * SECOND_NS
FORGED = {"agent_id": "b", "host": "h0"}


def sent(value: float, labels: dict[str, str], *, at_ns: int = NOW_NS - 60 * SECOND_NS) -> list[Sample]:
    return [Sample("cpu", at_ns + n * SECOND_NS, value, labels=labels) for n in range(5)]


HONEST = frame("b", 0, sent(10.0, {"host": "h0"}))
FORGERY = frame("a", 0, sent(666.0, FORGED, at_ns=NOW_NS - 30 * SECOND_NS))  # later: it would be the latest


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_NS)


@pytest.fixture
async def bucket(clock: ManualClock) -> MemoryStore:
    """Both batches were accepted: what was stored before is read as safely as what comes now."""
    store = MemoryStore(clock=clock)
    await accept(store, HONEST, NOW_NS - 20 * SECOND_NS)
    await accept(store, FORGERY, NOW_NS - 10 * SECOND_NS)
    return store


def selected(*matchers: str) -> Selector:
    return Selector("cpu", [parse(each) for each in matchers])


def shown(answer: QueryResponse | RollupResponse) -> dict[str, Any]:
    return {series.labels["agent_id"]: series.labels for series in answer.series}


def values(answer: dict[str, Any]) -> set[float]:
    return {value for series in answer["series"] for _, value in series["points"]}


@pytest.mark.parametrize(
    "settings", [{}, {"acceptance": "local_spool", "live_bytes_max": 0}], ids=["live state", "spool"]
)
async def test_latest_of_an_agent_is_what_that_agent_sent(
    clock: ManualClock, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """From live state or the spool: the forged sample is the forger's, and its claim is shown beside its identity."""
    spool = {"spool_dir": str(tmp_path)} if settings else {}
    async with collector(MemoryStore(clock=clock), clock=clock, **settings, **spool) as (client, _):
        for each in (HONEST, FORGERY):
            assert 200 == (await client.post("/v1/batches", content=each)).status_code
        theirs = (await client.get("/v1/query/latest?metric=cpu&match=agent_id%3Db")).json()
        forgers = (await client.get("/v1/query/latest?metric=cpu&match=agent_id%3Da")).json()
        others = (await client.get("/v1/query/latest?metric=cpu&match=agent_id!%3Db")).json()

    assert {10.0} == values(theirs)
    assert [{"agent_id": "b", "host": "h0"}] == [series["labels"] for series in theirs["series"]]
    assert {666.0} == values(forgers) == values(others)
    assert [{"agent_id": "a", "exported_agent_id": "b", "host": "h0"}] == [s["labels"] for s in forgers["series"]]


@pytest.mark.parametrize("rolled", [False, True], ids=["raw batches", "index chunks"])
async def test_a_range_of_an_agent_is_what_that_agent_sent(
    bucket: MemoryStore, clock: ManualClock, rolled: bool
) -> None:
    """Raw batches found by time, and batches found through the index of series, are the real sender's alone."""
    if rolled:
        await make_roller(bucket, clock).run()
        await clock.advance(3600)  # past the overlap: only the index leads to them
        await make_roller(bucket, clock).run()
    querier = Querier(make_sources(bucket, clock), points_max=1000, clock=clock)

    theirs = await querier.range(selected("agent_id=b"), HOUR_NS, END_NS)
    forgers = await querier.range(selected("agent_id=a"), HOUR_NS, END_NS)
    claimed = await querier.range(selected("exported_agent_id=b"), HOUR_NS, END_NS)

    assert {"b": {"agent_id": "b", "host": "h0"}} == shown(theirs)
    assert {10.0} == {value for series in theirs.series for _, value in series.points}
    assert {"a": {"agent_id": "a", "exported_agent_id": "b", "host": "h0"}} == shown(forgers) == shown(claimed)
    assert {"live": 0, "spool": 0, "raw": 1 if rolled else 2} == forgers.sources


@pytest.mark.parametrize("rolled", [False, True], ids=["samples", "rollup chunks"])
async def test_windows_of_an_agent_are_what_that_agent_sent(
    bucket: MemoryStore, clock: ManualClock, rolled: bool
) -> None:
    """Sums over samples and sums out of rollup chunks never count a forged sample for the agent it names."""
    if rolled:
        await make_roller(bucket, clock).run()
    rollups = RollupQuerier(runtime_on(bucket, clock), make_sources(bucket, clock))

    theirs = await rollups.range(selected("agent_id=b"), 3600, HOUR_NS, END_NS)
    forgers = await rollups.range(selected("agent_id=a"), 3600, HOUR_NS, END_NS)

    assert ([(5, 50.0)], {"b": {"agent_id": "b", "host": "h0"}}) == (
        [(bucket.count, bucket.sum) for series in theirs.series for bucket in series.buckets],
        shown(theirs),
    )
    assert [(5, 3330.0)] == [(bucket.count, bucket.sum) for series in forgers.series for bucket in series.buckets]
    assert 3600 * rolled == theirs.resolution_s


async def test_rows_for_tables_name_the_real_sender(bucket: MemoryStore, clock: ManualClock) -> None:
    """The feed of bronze and of Spark gives the sender in `agent_id`, prunes by it, and leaves labels as sent."""
    feed = BatchesFeed(bucket, now_ns=clock.now_ns, settle_s=-1.0)
    begin = await feed.begin()
    end = await feed.reach(begin, Limit())
    wanted = FeedFilter(among={"agent_id": frozenset({"b"})})

    pieces = await feed.slices(begin, end, wanted)
    loaded = [await feed.load(piece, ["agent_id", "labels", "value"], wanted) for piece in pieces]

    rows = [row for each in loaded if each is not None for row in each.to_pylist()]
    assert [{"agent_id": "b", "labels": [("host", "h0")], "value": 10.0}] * 5 == rows


def test_a_claimed_agent_is_renamed_and_nothing_else() -> None:
    """As Prometheus does: the prefix is repeated while the name is taken, and no label of the sample is lost."""
    assert {"agent_id": "a"} == query_labels("a", {})
    assert {"agent_id": "a", "exported_agent_id": "a"} == query_labels("a", {"agent_id": "a"})
    assert {"agent_id": "a", "exported_agent_id": ""} == query_labels("a", {"agent_id": ""})
    assert {"agent_id": "a", "exported_agent_id": "x", "exported_exported_agent_id": "b"} == query_labels(
        "a", {"agent_id": "b", "exported_agent_id": "x"}
    )
    assert {"agent_id": "a", "boot_id": "x", "seq": "7"} == query_labels("a", {"boot_id": "x", "seq": "7"})


def test_the_stored_bytes_keep_the_label_as_it_was_sent() -> None:
    """Only reading renames: what was hashed and accepted still decodes to the labels that were sent."""
    assert {FORGED["agent_id"]} == {row.labels["agent_id"] for row in decode(FORGERY).columns.rows()}
