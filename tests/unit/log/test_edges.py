"""Limits, defaults and answers of the log's smaller pieces."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgspec
import pytest
from httpx2 import ASGITransport, AsyncClient

from lakebed.core.errors import Corrupt, Invalid, LakebedError, Overloaded, Stale, Unavailable
from lakebed.core.feed import FeedFilter
from lakebed.core.settings import Contradiction
from lakebed.gateway.app import build
from lakebed.log import blob, codec, contracts, groups, paths, records
from lakebed.log.codec import BatchSegment, RecordColumns, checked, columns
from lakebed.log.cost import LIST_PAGE, MeteredStore
from lakebed.log.feed import TopicFeed, _bounds, open_feed
from lakebed.log.model import BackPressureRejected, OffsetOutOfRange, TopicPartition, check_topic, topic_partition
from lakebed.log.producers import Stamp, check_stamp
from lakebed.log.routes import LogRoutes
from lakebed.log.settings import LogSettings
from lakebed.store.memory import MemoryStore
from support.log_host import TP, Host


@pytest.mark.parametrize(
    "wrong",
    [
        {"poll_s": 0.0},
        {"producer_memory_s": 0.0},
        {"record_max_bytes": 100, "buffer_max_bytes": 99, "batch_max_bytes": 1},
        {"batch_max_bytes": 100, "buffer_max_bytes": 99, "record_max_bytes": 1},
        {"flights_max": 0},
        {"compact_workers": 0},
        {"compact_min_entries": 3, "compact_max_entries": 2},
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong: dict[str, Any]) -> None:
    """Each at its limit is fine."""
    with pytest.raises(Contradiction):
        LogSettings(**wrong).check()
    LogSettings(record_max_bytes=100, buffer_max_bytes=100, batch_max_bytes=100, flights_max=1).check()
    LogSettings(compact_min_entries=2, compact_max_entries=2, compact_workers=1).check()


def test_a_range_of_columns_is_cut_where_records_begin() -> None:
    """Slices, fits and joins count records and bytes of the right ones."""
    held = columns([b"a", b"", b"bbb", b"cc"])

    assert [b"", b"bbb"] == list(held.slice(1, 3))
    assert held is held.slice(0, 4) and 2 == held.slice(2, 4).count and 5 == held.slice(2, 4).size
    assert [4, 3, 2, 2, 1] == [
        held.fitting(0, 6),
        held.fitting(0, 5),
        held.fitting(0, 3),
        held.fitting(0, 1),
        held.fitting(2, 4),
    ]
    assert 0 == held.fitting(2, 2) and 2 == held.fitting(2, 5)


@pytest.mark.parametrize(
    ("count", "lengths", "payload"),
    [(0, b"", b""), (2, b"\1\0\0\0", b"a"), (1, b"\1\0\0\0\0\0\0\0", b"a"), (1, b"\2\0\0\0", b"a")],
)
def test_columns_from_outside_have_to_add_up(count: int, lengths: bytes, payload: bytes) -> None:
    """No records, too few or too many lengths, lengths of other bytes."""
    with pytest.raises(Invalid):
        checked(count, lengths, payload)
    assert [b"a"] == list(checked(1, b"\1\0\0\0", b"a"))


def test_a_batch_whose_lengths_do_not_add_up_is_corrupt_though_its_checksum_is_right() -> None:
    """A writer that is wrong about a length shifts no record."""
    good = columns([b"ab", b"c"])
    lying = RecordColumns(2, struct.pack("<II", 1, 1), good.payload)

    with pytest.raises(Corrupt, match="lengths"):
        codec.decode(b"".join(codec.encode([lying], [BatchSegment(2, 1)])))


def test_a_blob_of_another_version_is_refused() -> None:
    """A later Lakebed's blob is not guessed at."""
    made, _ = blob.encode([], 7)
    base = blob.PREFIX.size
    header = msgspec.json.decode(made[base:])
    other = msgspec.json.encode(header | {"version": header["version"] + 1})

    with pytest.raises(Corrupt, match="version"):
        blob.decode_header(blob.PREFIX.pack(blob.MAGIC, len(other)) + other)
    assert blob.decode_header(made)[0].created_at_ms == 7


async def test_a_dump_shows_what_blobs_hold(host: Host) -> None:
    """A shared blob by partition and a compacted one alike: counts, bytes, times, and the first five records."""
    broker, services = host.broker(), host.services()
    for number in range(2):
        await host.append(broker, b"x" * 100, b"\xff", *(b"%d" % n for n in range(4)))
        await host.clock.advance(number + 1.0)
    (first, _) = await host.objects()
    shown = blob.describe_blob((await host.store.get(first)).data)
    await services.compactor.compact_once(TP)
    (compacted,) = [key for key in await host.objects() if "compacted" in key]
    packed = blob.describe_blob((await host.store.get(compacted)).data)

    (part,) = shown["partitions"]
    assert ("wal-shared", "orders", 0, 6, 105) == (
        shown["format"],
        part["topic"],
        part["partition"],
        part["records"],
        part["bytes"],
    )
    assert ["x" * 60, "\\xff", "0", "1", "2"] == part["first"]
    assert ("bytes-batch-v1", 12, 210) == (packed["format"], packed["records"], packed["bytes"])
    assert [6, 6] == [segment["count"] for segment in packed["segments"]]
    assert 1000 == packed["segments"][1]["created_at_ms"] - packed["segments"][0]["created_at_ms"]
    with pytest.raises(Corrupt, match="neither"):
        blob.describe_blob(b"PAR1")


@pytest.mark.parametrize("name", ["", "a" * 201, "-a", "a/b", "a b", "é", "wal-shared", "vacuum", "a\n"])
def test_what_is_no_topic_is_refused(name: str) -> None:
    """Letters, digits, dot, dash and underscore, and none of our own folders."""
    with pytest.raises(Invalid):
        check_topic(name)
    assert "a" * 200 == check_topic("a" * 200)


def test_partitions_and_stamps_have_limits() -> None:
    """The last number is taken, the next is not."""
    assert 99_999 == topic_partition("t", 99_999).partition and 0 == topic_partition("t", 0).partition
    for wrong in (-1, 100_000):
        with pytest.raises(Invalid):
            topic_partition("t", wrong)
    assert Stamp("é" * 64, 0) == check_stamp("é" * 64, 0)
    for id, sequence in (("é" * 64 + "x", 0), ("", 0), ("p", -1), ("a\nb", 0)):
        with pytest.raises(Invalid):
            check_stamp(id, sequence)


def test_a_group_has_a_name() -> None:
    """The same letters as a topic's."""
    assert "g.1_a-b" == groups.check_group("g.1_a-b")
    for wrong in ("", "a/b", "g" * 201, " g"):
        with pytest.raises(Invalid):
            groups.check_group(wrong)


async def test_a_commit_has_a_first_and_a_last_offset(host: Host) -> None:
    """1 to the end, the end included; a commit keeps its note and its time."""
    broker = host.broker()
    await host.append(broker, b"a", b"b")
    for wrong in (0, 4):
        with pytest.raises(OffsetOutOfRange) as refused:
            await broker.groups.commit("g", TP, wrong)
        assert 2 == refused.value.detail["high_watermark"]
    await broker.groups.commit("g", TP, 1)
    await host.clock.advance(2.0)
    made = await broker.groups.commit("g", TP, 3, note="by hand")
    (row,) = await broker.groups.progress("orders")

    assert (3, "by hand", 0) == (made.offset, made.note, made.generation)
    assert host.clock.now_ns() // 1_000_000 == made.committed_at_ms == row.committed_at_ms
    assert (0, 2, "g", "orders", 0, 0) == (
        row.lag,
        row.high_watermark,
        row.group,
        row.topic,
        row.partition,
        row.generation,
    )
    assert [] == await broker.groups.progress("orders", "other")


async def test_a_claim_keeps_the_offset_and_its_note(host: Host) -> None:
    """Only generation and time change; the first claim of a group that committed nothing is at 0."""
    broker = host.broker()
    await host.append(broker, b"a", b"b")
    assert (0, 1) == (await first(broker, "new"))
    await broker.groups.commit("g", TP, 2, note="n")
    claimed = await broker.groups.claim("g", TP)
    assert (2, "n", 1) == (claimed.offset, claimed.note, claimed.generation)
    assert await broker.groups.committed("never", TP) is None


async def first(broker: Any, group: str) -> tuple[int, int]:
    made = await broker.groups.claim(group, TP)
    return made.offset, made.generation


async def test_a_record_that_always_changes_ends_as_overloaded(host: Host) -> None:
    """A commit and a change of the control record give up after their tries."""
    broker = host.broker()
    await host.append(broker, b"a")
    tries = []

    async def stale(key: str, value: bytes, **_: Any) -> Any:
        tries.append(key)
        raise Stale("changed")

    broker.meta.put = stale  # type: ignore[method-assign]
    for work in (broker.groups.commit("g", TP, 1), broker.admin.fence(TP, reason="x")):
        running = asyncio.ensure_future(work)
        while not running.done():
            await host.clock.advance(1.0)
        assert isinstance(running.exception(), Overloaded)
    assert 2 * records.SWAPS_MAX == len(tries)


async def test_entries_of_a_partition_are_walked_past_one_page(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each span once, in order, from the offset on."""
    monkeypatch.setattr(records, "PAGE", 2)
    broker = host.broker()
    for number in range(5):
        await host.append(broker, b"%d" % number)

    assert [1, 2, 3, 4, 5] == [span.end_offset async for span in broker.records.all_spans(TP)]
    assert [4, 5] == [span.end_offset async for span in broker.records.all_spans(TP, 4)]


async def test_an_entry_that_does_not_decode_is_corrupt_and_named(host: Host) -> None:
    """Nothing is guessed, and nothing is changed."""
    broker = host.broker()
    await host.append(broker, b"a")
    host.state.store(paths.index(TP, 1), b"{", None)

    with pytest.raises(Corrupt) as found:
        await broker.records.spans(TP, 1, limit=1)
    assert paths.index(TP, 1) == found.value.detail["key"]
    with pytest.raises(Corrupt):
        paths.index_offset("llog/orders/partitions/0/index/x")


def test_keys_name_their_partition() -> None:
    """And keys of a topic, a group or of nobody name none."""
    assert TopicPartition("a:b", 7) == paths.partition_of("a:b:7")
    for key in ("orders", "orders:x", ":1", "orders:"):
        assert paths.partition_of(key) is None
    assert TP == paths.owner_of(paths.control(TP)) == paths.owner_of(paths.index(TP, 1))
    for key in (
        paths.config("orders"),
        paths.group_offset(TP, "g"),
        "llog/orders/partitions/x/meta/control",
        "x/orders/partitions/0/m/c",
    ):
        assert paths.owner_of(key) is None
    assert paths.index(TP, 9) < paths.index(TP, 10) < paths.index(TP, paths.LAST_OFFSET)


@pytest.mark.parametrize(
    ("url", "prefix", "root"),
    [
        ("s3://b", "", "s3://b/"),
        ("s3://b/", "p/", "s3://b/p/"),
        ("s3://b", "/p/q", "s3://b/p/q/"),
        ("memory:", "", "memory://"),
    ],
)
def test_references_are_under_the_stores_own_root(url: str, prefix: str, root: str) -> None:
    """A key goes into a reference and comes out of it; another bucket's does not."""
    known = paths.uris(url, prefix, " s3://old/x ,")
    assert f"{root}llog/a" == known.uri("llog/a") and "llog/a" == known.key(f"{root}llog/a")
    assert "llog/a" == known.key("s3://old/x/llog/a")
    with pytest.raises(Corrupt, match="not under"):
        known.key("s3://other/llog/a")


async def test_every_request_is_counted_by_what_it_costs(host: Host) -> None:
    """Lists by the thousand, heads as gets, deletes free; the cost gauge follows."""
    context = host.context()
    store, metrics = MeteredStore(context.on(MemoryStore(clock=host.clock))), context.metrics

    async def chunks() -> Any:
        yield b"x"

    made = await store.create("llog/a", b"1")
    await store.replace("llog/a", b"22", made.etag)
    await store.upload("llog/b", chunks())
    await store.get("llog/a")
    await store.head("llog/a")
    await store.get_range("llog/a", 0, 1)
    await store.children("llog/")
    assert [] == [info async for info in store.list("nothing/")]
    for number in range(LIST_PAGE - 1):
        await store.create(f"llog/c{number}", b"")
    assert 3 == (await store.measure()).stored_bytes
    counted = {op: metrics.value("lakebed_log_s3_requests_total", op=op) for op in ("put", "list", "get", "range_get")}

    assert {"put": 2 + LIST_PAGE, "list": 4, "get": 2, "range_get": 1} == counted
    assert (3, 1 + LIST_PAGE) == (
        metrics.value("lakebed_log_s3_stored_bytes"),
        metrics.value("lakebed_log_s3_stored_objects"),
    )
    await store.delete("llog/a")
    assert pytest.approx((6 + LIST_PAGE) * 5e-6 + 3 * 4e-7) == metrics.value("lakebed_log_s3_request_cost_dollars")
    assert pytest.approx(3 / 1024**3 * 0.023) == metrics.value("lakebed_log_s3_storage_cost_dollars_month")


def test_bounds_of_a_feed_are_an_offset_or_offsets_by_partition() -> None:
    """And nothing else."""
    assert ({}, {"": 7}, {"0": 3}) == (_bounds("start", ""), _bounds("start", "7"), _bounds("end", '{"0": 3}'))
    for wrong in ("x", "-1", '{"0": "a"}', "[1]"):
        with pytest.raises(Invalid, match="option start"):
            _bounds("start", wrong)


def test_a_feed_needs_a_topic(host: Host) -> None:
    """The option that is missing is named."""
    with pytest.raises(Invalid, match="topic"):
        open_feed(host.context(), {})


def test_results_of_one_request_are_one_status() -> None:
    """All good 200; all to be retried 503 with the longest wait; anything else 409 without one."""
    good = object()
    away, full, fatal = Unavailable("x", retry_after_s=2.5), BackPressureRejected("y", retry_after_s=0.1), Invalid("z")

    assert [200, 503, 409, 409, 200] == [
        contracts.status(each) for each in ([good], [away, full], [away, good], [away, fatal], [])
    ]
    assert {"retry-after": "3"} == contracts.headers([full, away])
    assert {"retry-after": "1"} == contracts.headers([full])
    assert {} == contracts.headers([away, good])


def test_a_record_over_the_limit_is_refused_and_many_small_ones_are_not() -> None:
    """The limit is on one record; exactly the limit is taken."""
    assert 2 == contracts.chunk_of("t", 0, columns([b"x" * 10, b"y" * 10]), None, None, 10)[1].records.count
    with pytest.raises(Invalid, match="record_max_bytes"):
        contracts.chunk_of("t", 0, columns([b"x" * 11]), None, None, 10)
    for id, sequence in (("p", None), (None, 0)):
        with pytest.raises(Invalid, match="together"):
            contracts.chunk_of("t", 0, columns([b"x"]), id, sequence, 10)


async def test_a_piece_of_a_feed_that_was_trimmed_is_named(host: Host) -> None:
    """A piece whose records were trimmed before the read is NotFound, with its offsets."""
    broker, services = host.broker(), host.services()
    for number in range(3):
        await host.append(broker, b"%d" % number)
    feed = TopicFeed("orders", services.records, services.reader, services.uris, start={}, end={})
    planned = await feed.slices({}, {"0": 3}, FeedFilter())
    assert {"0": 3} == await feed.high_watermark()
    await broker.admin.trim(TP, 4)
    for key in await host.objects():
        await host.store.delete(key)

    with pytest.raises(LakebedError, match="trimmed before the read"):
        await feed.load(planned[0], ["value"], FeedFilter())


async def test_a_topic_is_described_and_configured_over_http(host: Host) -> None:
    """What is kept of it is answered as it was set; a topic without partitions is 404; the deed is recorded."""
    context = host.context()
    routes = LogRoutes(context, host.meta())
    await host.append(routes.broker, b"a", b"b")
    async with AsyncClient(
        transport=ASGITransport(app=build(context, [routes])), base_url="http://localhost"
    ) as client:
        before = (await client.get("/v1/topics/orders")).json()
        put = await client.put("/v1/topics/orders/config", json={"retention_s": 5.5, "retention_bytes": 9})
        wrong = await client.put("/v1/topics/orders/config", json={"retention_s": "x"})
        after = (await client.get("/v1/topics/orders")).json()
        missing = await client.get("/v1/topics/nothing")

    assert before["config"] is None and [(0, 2, 2)] == [
        (row["partition"], row["records"], row["high_watermark"]) for row in before["partitions"]
    ]
    assert (200, {"retention_s": 5.5, "retention_bytes": 9}) == (put.status_code, put.json())
    assert put.json() == after["config"] and 400 == wrong.status_code
    assert (404, "application/problem+json") == (missing.status_code, missing.headers["content-type"])
    assert "topic nothing does not exist" == missing.json()["message"]
    assert ("ok", "roles both, 0 bytes buffered") == ((await routes.health()).status, (await routes.health()).detail)
    routes.broker.producer._held = routes.broker.settings.buffer_max_bytes
    assert "degraded" == (await routes.health()).status
