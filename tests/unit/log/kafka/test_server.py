"""The server of Kafka's protocol without a socket: limits of a connection, and what batches become on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.index import load_request_schema
from kio.serial import entity_writer

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Corrupt, Invalid
from lakebed.core.quotas import KeyQuotas
from lakebed.gateway.auth import Keyring
from lakebed.gateway.keys import KeyRecord, digest
from lakebed.log.kafka import wire
from lakebed.log.kafka.data import DataRequests, _kept, served
from lakebed.log.kafka.server import FRAME_BYTES_MAX, LENGTH, STRANGER_BYTES_MAX, FlightBytes, KafkaConnection
from lakebed.log.kafka.stream import SHARED_BYTES, FrameStream
from lakebed.log.kafka.wire import shaped
from lakebed.log.kafka_batch import HEADER, KafkaRecord, checked, encode, kafka_records, split
from lakebed.log.model import TopicPartition
from lakebed.log.producers import RecordChunk

KEY = KeyRecord("ann", digest(b"0123456789abcdef").hex(), ("*",))


class Transport:
    """A client's connection without a socket: counts how often reading was paused and resumed."""

    def __init__(self) -> None:
        self.pauses = self.resumes = 0
        self.written = b""

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.pauses += 1

    def resume_reading(self) -> None:
        self.resumes += 1

    def write(self, data: bytes) -> None:
        self.written += data


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


def feed(stream: FrameStream, data: bytes) -> int:
    """As the event loop does, once: gives how much it received."""
    buffer = stream.get_buffer(-1)
    some = data[: len(buffer)]
    buffer[: len(some)] = some
    stream.buffer_updated(len(some))
    return len(some)


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


def test_a_fetch_into_the_middle_of_a_batch_has_the_offsets_of_its_records() -> None:
    """A batch is served whole, so it begins before the offset that was asked for; the next follows it."""
    data = b"".join(encode([KafkaRecord(b"%d" % n) for n in range(first, first + 3)]) for first in (0, 3))
    records = kafka_records(checked(data), data).take(1, 10**6, least=1)

    bases = [HEADER.unpack_from(batch.data)[0] for batch in split(served(11, [records]))]

    assert [10, 13] == bases
