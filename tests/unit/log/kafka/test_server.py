"""The server of Kafka's protocol without a socket: limits of a connection, and what batches become on their way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.index import load_request_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_writer

import lakebed.log.kafka.data
import lakebed.log.kafka.server
from lakebed.core.auth import ANYBODY
from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import Corrupt, Invalid, LakebedError, Overloaded, Unavailable
from lakebed.core.quotas import KeyQuotas
from lakebed.gateway.auth import Keyring
from lakebed.gateway.keys import KeyRecord, digest
from lakebed.log.brokers import GROUP, BrokerRecord, key_of
from lakebed.log.kafka import wire
from lakebed.log.kafka.data import DataRequests, _kept, served
from lakebed.log.kafka.group_requests import GroupRequests
from lakebed.log.kafka.server import (
    FRAME_BYTES_MAX,
    LENGTH,
    STRANGER_BYTES_MAX,
    FlightBytes,
    KafkaConnection,
    KafkaServer,
)
from lakebed.log.kafka.service import TOPICS_FRESH_S, RequestInfo
from lakebed.log.kafka.stream import SHARED_BYTES, FrameStream
from lakebed.log.kafka.topic_requests import TopicRequests
from lakebed.log.kafka.wire import API_VERSIONS, shaped
from lakebed.log.kafka_batch import HEADER, KafkaRecord, checked, encode, kafka_records, split
from lakebed.log.model import TopicPartition
from lakebed.log.producers import RecordChunk
from support.kafka_port import Transport, feed, services_of
from support.log_host import Host

KEY = KeyRecord("ann", digest(b"0123456789abcdef").hex(), ("*",))


def connection(stream: FrameStream, flight: FlightBytes, keys: Sequence[KeyRecord]) -> KafkaConnection:
    server: Any = SimpleNamespace(flight=flight)
    access = SimpleNamespace(keyring=Keyring(tuple(keys), ManualClock()), quotas=KeyQuotas(ManualClock()))
    services: Any = SimpleNamespace(access=access)
    return KafkaConnection(server, services, stream)


def connected() -> tuple[FrameStream, Transport]:
    async def nothing(_: FrameStream) -> None:
        return None

    stream, transport = FrameStream(nothing), Transport()
    stream.connection_made(transport)  # type: ignore[arg-type]
    return stream, transport


def incoming(*parts: bytes) -> FrameStream:
    """A client that sends this and leaves."""
    stream, _ = connected()
    for part in parts:
        feed(stream, part)
    stream.eof_received()
    return stream


@given(st.lists(st.integers(0, 3 * SHARED_BYTES), max_size=5), st.lists(st.integers(1, 2 * SHARED_BYTES), min_size=1))
@settings(max_examples=40, deadline=None)
def test_requests_arrive_whole_and_in_order_however_their_bytes_are_cut(sizes: list[int], cuts: list[int]) -> None:
    """Short and long ones mixed. Reading pauses only while nothing is taken, and goes on when something is."""
    frames = [bytes([number + 1]) * size for number, size in enumerate(sizes)]

    async def play() -> list[bytes]:
        stream, transport = connected()

        async def send() -> None:
            data, turn = memoryview(b"".join(frames)), 0
            while data:
                if transport.pauses == transport.resumes:
                    data = data[feed(stream, bytes(data[: cuts[turn % len(cuts)]])) :]
                    turn += 1
                await asyncio.sleep(0)
            stream.eof_received()

        sending = asyncio.ensure_future(send())
        async with asyncio.timeout(30):
            found = [bytes(await stream.readexactly(len(frame))) for frame in frames]
            await sending
            with pytest.raises(asyncio.IncompleteReadError):
                await stream.readexactly(1)
        return found

    assert frames == asyncio.run(play())


async def test_a_large_request_stays_in_the_buffer_in_which_it_was_received() -> None:
    """The loop writes into it; what is given is a view on it, which nobody can change."""
    stream, _ = connected()
    reading = asyncio.ensure_future(stream.readexactly(SHARED_BYTES + 5))
    await asyncio.sleep(0)
    received = stream.get_buffer(-1)
    received[:] = b"x" * len(received)
    stream.buffer_updated(len(received))
    data = await reading

    assert isinstance(data, memoryview) and data.readonly and data.obj is received.obj
    assert b"x" * (SHARED_BYTES + 5) == data


async def test_an_answer_waits_while_the_client_takes_none_and_fails_when_it_is_gone() -> None:
    """A client that leaves in the meantime is no answered one."""
    stream, transport = connected()
    stream.write(b"answer")
    stream.pause_writing()
    waiting = asyncio.ensure_future(stream.drain())
    await asyncio.sleep(0)
    assert not waiting.done() and b"answer" == transport.written
    stream.resume_writing()
    await waiting
    stream.pause_writing()
    waiting = asyncio.ensure_future(stream.drain())
    await asyncio.sleep(0)
    stream.connection_lost(None)

    with pytest.raises(ConnectionResetError):
        await waiting
    await stream.wait_closed()


def produce_frame(version: int, transactional_id: str | None, topics: Sequence[tuple[str, Any]]) -> tuple[bytes, Any]:
    """A Produce as kio writes it, and its body."""
    kind: Any = load_request_schema(0, version)
    fields = {
        "transactional_id": transactional_id,
        "acks": -1,
        "timeout": timedelta(seconds=3),
        "topic_data": [
            {"name": name, "partition_data": [{"index": index, "records": records} for index, records in parts]}
            for name, parts in topics
        ],
    }
    body, head = shaped(kind, fields), kind.__header_schema__
    out = BytesIO()
    entity_writer(head)(out, shaped(head, {"request_api_key": 0, "request_api_version": version, "client_id": "c"}))
    entity_writer(kind)(out, body)
    return out.getvalue(), body


def plain(body: Any) -> Any:
    """What is used of a Produce, as plain values."""
    topics = [
        (
            topic.name,
            [(part.index, None if part.records is None else bytes(part.records)) for part in topic.partition_data],
        )
        for topic in body.topic_data
    ]
    return body.transactional_id, body.acks, topics


PARTITIONS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.none() | st.binary(max_size=300)), max_size=4)
TOPICS = st.lists(st.tuples(st.text(max_size=9), PARTITIONS), max_size=3)


@given(st.integers(3, 12), st.none() | st.text(max_size=5), TOPICS, st.data())
@settings(max_examples=150, deadline=None)
def test_a_large_produce_is_read_as_kio_reads_it_and_without_copies(
    version: int, transactional_id: str | None, topics: list[tuple[str, Any]], data: st.DataObject
) -> None:
    """In every version; damaged bytes are refused, or mean the same to both."""
    frame, _ = produce_frame(version, transactional_id, topics)
    read_head, read_body = wire._readers(0, version)
    _, at = read_head(frame, 0)
    expected = read_body(frame, at)[0]
    found = wire.read_produce(memoryview(frame), at, version)
    views = [part.records for topic in found.topic_data for part in topic.partition_data if part.records is not None]

    assert plain(expected) == plain(found)
    assert all(view.obj is frame for view in views)

    spoiled = bytearray(frame)
    spoiled[data.draw(st.integers(at, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        changed = wire.read_produce(memoryview(spoiled), at, version)
    except Exception:
        return
    assert plain(read_body(bytes(spoiled), at)[0]) == plain(changed)


def test_only_a_large_produce_is_read_here_and_one_that_is_cut_is_refused() -> None:
    """The smaller ones are kio's. A request that ends too early is Invalid, wherever it ends."""
    small, _ = produce_frame(9, None, [("t", [(0, b"x")])])
    large, body = produce_frame(9, None, [("t", [(0, b"x" * wire.LARGE_BYTES), (1, None)])])

    assert not isinstance(wire.read_request(small).body, wire.KafkaProduce)
    assert plain(body) == plain(wire.read_request(memoryview(large)).body)
    for end in (wire.LARGE_BYTES, len(large) - 3):
        with pytest.raises(Invalid, match="does not decode"):
            wire.read_request(memoryview(large)[:end])


@pytest.mark.parametrize(
    ("keys", "length"), [([KEY], STRANGER_BYTES_MAX + 1), ([], FRAME_BYTES_MAX + 1), ([], 0), ([], -5)]
)
async def test_a_frame_over_the_limit_is_refused_before_it_is_read(keys: list[KeyRecord], length: int) -> None:
    """Who has not authenticated yet may send what that takes, and no more."""
    flight = FlightBytes(10**9)

    with pytest.raises(Invalid, match="is the limit"):
        await connection(incoming(LENGTH.pack(length)), flight, keys).run()

    assert 0 == flight._held


@pytest.mark.parametrize(("keys", "length"), [([KEY], STRANGER_BYTES_MAX), ([], STRANGER_BYTES_MAX + 1)])
async def test_a_client_that_leaves_in_the_middle_of_a_frame_holds_no_memory(
    keys: list[KeyRecord], length: int
) -> None:
    """Its bytes were taken from the budget of all clients: they are given back."""
    flight = FlightBytes(10**9)

    with pytest.raises(EOFError):
        await connection(incoming(LENGTH.pack(length), b"half"), flight, keys).run()

    assert 0 == flight._held


def stamped(data: bytes, producer_id: int) -> bytes:
    """The batch with a producer, and its checksum."""
    import google_crc32c

    fields = list(HEADER.unpack_from(data))
    fields[9], fields[10], fields[11] = producer_id, 0, 0
    whole = HEADER.pack(*fields) + data[HEADER.size :]
    fields[4] = google_crc32c.value(whole[21:])
    return HEADER.pack(*fields) + data[HEADER.size :]


def chunk(data: bytes | memoryview) -> RecordChunk:
    limits = SimpleNamespace(record_max_bytes=10**6)
    requests = DataRequests(SimpleNamespace(broker=SimpleNamespace(settings=limits)))  # type: ignore[arg-type]
    return requests._chunk(data)


def test_an_idempotent_producer_sends_one_batch_at_a_time() -> None:
    """Of a second one in the same request a retry could not be recognised; others may send several."""
    one = encode([KafkaRecord(b"a"), KafkaRecord(b"b")])

    assert (4, None) == ((several := chunk(one + one)).records.count, several.stamp)
    assert (chunk(stamped(one, 7)).stamp or several).sequence == 0  # type: ignore[union-attr]
    with pytest.raises(Corrupt, match="one batch"):
        chunk(stamped(one, 7) + stamped(one, 7))


def test_records_keep_their_request_in_memory_only_where_it_is_mostly_records() -> None:
    """Or else a client fills a cache with little that holds much: requests in which most is refused."""
    one = encode([KafkaRecord(b"x" * 1000)])
    tp = TopicPartition("t", 0)
    dense, sparse = bytes(100) + one, bytes(3000) + one
    of_dense, of_sparse = (chunk(memoryview(frame)[-len(one) :]) for frame in (dense, sparse))
    kept, copied = _kept([(tp, of_dense)]), _kept([(tp, of_sparse)])

    assert of_dense is kept[0][1]
    assert (1, one) == (copied[0][1].records.count, copied[0][1].records.payload)
    assert not isinstance(copied[0][1].records.payload, memoryview)


def test_records_that_are_copied_out_of_their_request_are_still_recognised_when_they_are_sent_again() -> None:
    """An idempotent producer's retry of a request in which most is no record appends nothing twice."""
    one = stamped(encode([KafkaRecord(b"x" * 1000)]), 7)
    sent = chunk(memoryview(bytes(3000) + one)[-len(one) :])

    ((_, copied),) = _kept([(TopicPartition("t", 0), sent)])

    assert copied is not sent and sent.stamp is not None
    assert (sent.stamp, sent.crc) == (copied.stamp, copied.crc)


def test_a_fetch_into_the_middle_of_a_batch_has_the_offsets_of_its_records() -> None:
    """A batch is served whole, so it begins before the offset that was asked for; the next follows it."""
    data = b"".join(encode([KafkaRecord(b"%d" % n) for n in range(first, first + 3)]) for first in (0, 3))
    records = kafka_records(checked(data), data).take(1, 10**6, least=1)

    bases = [HEADER.unpack_from(batch.data)[0] for batch in split(served(11, [records]))]

    assert [10, 13] == bases


def request(key: int, version: int, **fields: Any) -> bytes:
    """A frame as a client sends it."""
    kind: Any = load_request_schema(key, version)
    head, out = kind.__header_schema__, BytesIO()
    entity_writer(head)(out, shaped(head, {"request_api_key": key, "request_api_version": version, "client_id": "c"}))
    entity_writer(kind)(out, shaped(kind, fields))
    return LENGTH.pack(len(out.getvalue())) + out.getvalue()


@pytest.fixture
async def streams() -> AsyncIterator[list[FrameStream]]:
    """Connections of a test, lost at its end: a server waits for that."""
    made: list[FrameStream] = []
    yield made
    for stream in made:
        stream.connection_lost(None)
    await settle(50)


async def test_connections_are_counted_and_limited_and_requests_are_counted_by_their_kind(
    monkeypatch: pytest.MonkeyPatch, streams: list[FrameStream]
) -> None:
    """A client beyond the limit is closed at once; one that leaves makes room, and is counted no more."""
    monkeypatch.setattr(lakebed.log.kafka.server, "CONNECTIONS_MAX", 2)
    host = Host()
    context = host.context()
    server = KafkaServer(services_of(host, context))

    async def client() -> Transport:
        stream, transport = FrameStream(server._serve), Transport()
        streams.append(stream)
        stream.connection_made(transport)  # type: ignore[arg-type]
        await settle()
        return transport

    def connections() -> float:
        return context.metrics.value("lakebed_log_kafka_connections")

    asking, second, third = [await client() for _ in range(3)]
    assert (2, [False, False, True]) == (connections(), [one.closed for one in (asking, second, third)])
    for _ in range(2):
        feed(streams[0], request(API_VERSIONS, 0))
    await settle(50)
    assert 2 == context.metrics.value("lakebed_log_kafka_requests_total", api="api_versions")
    assert asking.written
    streams[0].connection_lost(None)
    await settle(50)
    assert (True, 1) == (asking.closed, connections())
    fourth = await client()
    assert (False, 2) == (fourth.closed, connections())


async def test_the_partitions_of_a_topic_are_asked_for_once_a_second() -> None:
    """What another broker creates is seen after that; what this one creates or deletes at once."""
    host = Host()
    services, other = services_of(host, host.context()), host.broker()
    catalog = services.catalog
    none = await catalog.partitions("orders")
    await host.append(other, b"x", tp=TopicPartition("orders", 2))
    await host.clock.advance(TOPICS_FRESH_S)
    remembered = await catalog.partitions("orders")
    await host.clock.advance(0.01)
    seen = await catalog.partitions("orders")
    await catalog.create("orders", 3, 5)
    created = await catalog.partitions("orders")
    services.forget("orders", await services.broker.admin.delete("orders", reason="test"))

    assert (0, 0, 3, 5, 0) == (none, remembered, seen, created, await catalog.partitions("orders"))


async def test_administration_is_sent_to_the_broker_that_answers() -> None:
    """It is alive; one that was killed is among the brokers until its lease is over, and clients would wait for it."""
    host = Host()
    services = services_of(host, host.context())
    registry = services.registry
    registry.me = msgspec.structs.replace(registry.me, kafka="127.0.0.1:9093", kafka_id=9)
    killed = msgspec.json.encode(BrokerRecord("killed", kafka="127.0.0.1:9092", kafka_id=1))
    await host.meta_put(key_of("killed"), killed, GROUP)

    requests = TopicRequests(services)
    metadata = await requests.metadata(SimpleNamespace(topics=[], allow_auto_topic_creation=False), info_of(9))
    cluster = await requests.describe_cluster(SimpleNamespace(), info_of(0))

    assert [1, 9] == [broker["node_id"] for broker in metadata["brokers"]]
    assert (9, 9) == (metadata["controller_id"], cluster["controller_id"])


async def test_partitions_are_created_from_the_highest_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that fails in the middle, the next client that asks for the topic gets all of them."""
    host = Host()
    catalog = (services := services_of(host, host.context())).catalog
    ensure = services.broker.writer.ensure

    async def failing(tp: TopicPartition) -> Any:
        if tp.partition == 1:
            raise Unavailable("meta is away")
        return await ensure(tp)

    monkeypatch.setattr(services.broker.writer, "ensure", failing)
    with pytest.raises(Unavailable):
        await catalog.create("orders", 0, 4)
    monkeypatch.undo()

    assert 4 == await catalog.partitions("orders")
    assert [0, 1, 2, 3] == [tp.partition for tp in await services.broker.admin.partitions("orders")]


def info_of(version: int) -> RequestInfo:
    return RequestInfo(version, "c", "127.0.0.1", ANYBODY)


def fetch_of(*partitions: int) -> SimpleNamespace:
    parts = [SimpleNamespace(partition=n, fetch_offset=1, partition_max_bytes=1000) for n in partitions]
    topic = SimpleNamespace(topic="orders", partitions=parts)
    return SimpleNamespace(topics=[topic], max_wait=timedelta(0), min_bytes=0, max_bytes=1000, rack_id="")


async def test_a_consumer_retries_while_the_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Java's consumer ends with an IllegalStateException for every code of "try again" but a few."""
    host = Host()
    services = services_of(host, host.context())
    await host.append(host.broker(), b"x", tp=TopicPartition("orders", 0))

    async def away(*_: Any, **__: Any) -> Any:
        raise Unavailable("meta is away")

    monkeypatch.setattr(services.broker.meta, "get", away)
    monkeypatch.setattr(services.broker.meta, "range", away)
    data = DataRequests(services)
    fetched = await data.fetch(fetch_of(0), info_of(12))
    part = SimpleNamespace(partition_index=0, timestamp=-2)
    wanted = SimpleNamespace(topics=[SimpleNamespace(name="orders", partitions=[part])])
    listed = await data.list_offsets(wanted, info_of(5))

    assert ErrorCode.kafka_storage_error == fetched["responses"][0]["partitions"][0]["error_code"]
    assert ErrorCode.kafka_storage_error == listed["topics"][0]["partitions"][0]["error_code"]


async def test_partitions_beyond_the_limit_of_a_request_are_answered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a code after which clients retry: a partition without an answer would wait for ever."""
    monkeypatch.setattr(lakebed.log.kafka.data, "PARTITIONS_MAX", 2)
    host = Host()
    data = DataRequests(services_of(host, host.context()))
    records = encode([KafkaRecord(b"v")])
    parts = [SimpleNamespace(index=n, records=records) for n in range(3)]
    topic = SimpleNamespace(name="orders", partition_data=parts)
    answer = data.produce(SimpleNamespace(topic_data=[topic], transactional_id=None, acks=-1), info_of(9), {})
    await host.clock.advance(1.0)
    produced = (await answer)["responses"][0]["partition_responses"]
    fetched = (await data.fetch(fetch_of(0, 1, 2), info_of(12)))["responses"][0]["partitions"]

    assert [ErrorCode.none, ErrorCode.none, ErrorCode.not_enough_replicas] == [row["error_code"] for row in produced]
    assert [ErrorCode.none, ErrorCode.none, ErrorCode.kafka_storage_error] == [row["error_code"] for row in fetched]


@pytest.mark.parametrize(("names", "waits"), [(["orders"], True), (["orders", "no topic"], False)])
async def test_a_fetch_waits_for_records_only_where_no_partition_is_refused(names: list[str], waits: bool) -> None:
    """A client learns at once what it may not read; otherwise it gets its answer after max_wait at the latest."""
    host = Host()
    await host.append(host.broker(), b"x", tp=TopicPartition("orders", 0))
    asked = fetch_of(0)
    part = SimpleNamespace(partition=0, fetch_offset=2, partition_max_bytes=1000)
    asked.topics = [SimpleNamespace(topic=name, partitions=[part]) for name in names]
    asked.max_wait, asked.min_bytes = timedelta(seconds=3), 1

    answering = asyncio.ensure_future(DataRequests(services_of(host, host.context())).fetch(asked, info_of(12)))
    await host.clock.advance(0.1)
    at_once = answering.done()
    await host.clock.advance(3.0)
    rows = [topic["partitions"][0] for topic in (await answering)["responses"]]

    assert (not waits, ErrorCode.none) == (at_once, rows[0]["error_code"])
    assert [ErrorCode.invalid_request] * (len(names) - 1) == [row["error_code"] for row in rows[1:]]


@pytest.mark.parametrize("kind", [Unavailable, Overloaded])
@pytest.mark.parametrize("version", [1, 7, 8])
async def test_a_group_retries_while_its_offsets_cannot_be_read_or_written(
    monkeypatch: pytest.MonkeyPatch, version: int, kind: type[LakebedError]
) -> None:
    """Clients give up with other codes, and take a partition without a row for one without a committed offset."""
    host = Host()
    services = services_of(host, host.context())
    await host.append(host.broker(), b"x", tp=TopicPartition("orders", 0))

    async def away(*_: Any, **__: Any) -> Any:
        raise kind("not now")

    monkeypatch.setattr(services.broker.groups, "store", away)
    monkeypatch.setattr(services.broker.groups, "committed", away)
    requests = GroupRequests(services)
    part = SimpleNamespace(partition_index=0, committed_offset=1, committed_metadata="")
    topic = SimpleNamespace(name="orders", partitions=[part], partition_indexes=[0])
    group = SimpleNamespace(group_id="g", topics=[topic], generation_id_or_member_epoch=-1, member_id="")
    committed = await requests.offset_commit(group, info_of(7))
    fetched = await requests.offset_fetch(
        SimpleNamespace(groups=[group], group_id="g", topics=[topic]), info_of(version)
    )
    (found,) = fetched["groups"] if version >= 8 else [fetched]

    again = ErrorCode.coordinator_not_available
    assert again == committed["topics"][0]["partitions"][0]["error_code"]
    assert (again, again) == (found["error_code"], found["topics"][0]["partitions"][0]["error_code"])
