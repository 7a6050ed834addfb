"""The server of Kafka's protocol without a socket: limits of a connection, and what batches become on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Corrupt, Invalid
from lakebed.core.quotas import KeyQuotas
from lakebed.gateway.auth import Keyring
from lakebed.gateway.keys import KeyRecord, digest
from lakebed.log.kafka.data import DataRequests, served
from lakebed.log.kafka.server import FRAME_BYTES_MAX, LENGTH, STRANGER_BYTES_MAX, FlightBytes, KafkaConnection
from lakebed.log.kafka_batch import HEADER, KafkaRecord, checked, encode, kafka_records, split
from lakebed.log.producers import RecordChunk

KEY = KeyRecord("ann", digest(b"0123456789abcdef").hex(), ("*",))


class Writer:
    """A client that takes everything."""

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None


def connection(reader: asyncio.StreamReader, flight: FlightBytes, keys: Sequence[KeyRecord]) -> KafkaConnection:
    server: Any = SimpleNamespace(flight=flight)
    access = SimpleNamespace(keyring=Keyring(tuple(keys), ManualClock()), quotas=KeyQuotas(ManualClock()))
    services: Any = SimpleNamespace(access=access)
    return KafkaConnection(server, services, reader, Writer())  # type: ignore[arg-type]


def incoming(*parts: bytes, ends: bool = True) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    for part in parts:
        reader.feed_data(part)
    if ends:
        reader.feed_eof()
    return reader


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


def chunk(data: bytes) -> RecordChunk:
    settings = SimpleNamespace(record_max_bytes=10**6)
    requests = DataRequests(SimpleNamespace(broker=SimpleNamespace(settings=settings)))  # type: ignore[arg-type]
    return requests._chunk(data)


def test_an_idempotent_producer_sends_one_batch_at_a_time() -> None:
    """Of a second one in the same request a retry could not be recognised; others may send several."""
    one = encode([KafkaRecord(b"a"), KafkaRecord(b"b")])

    assert (4, None) == ((plain := chunk(one + one)).records.count, plain.stamp)
    assert (chunk(stamped(one, 7)).stamp or plain).sequence == 0  # type: ignore[union-attr]
    with pytest.raises(Corrupt, match="one batch"):
        chunk(stamped(one, 7) + stamped(one, 7))


def test_a_fetch_into_the_middle_of_a_batch_has_the_offsets_of_its_records() -> None:
    """A batch is served whole, so it begins before the offset that was asked for; the next follows it."""
    data = b"".join(encode([KafkaRecord(b"%d" % n) for n in range(first, first + 3)]) for first in (0, 3))
    records = kafka_records(checked(data), data).take(1, 10**6, least=1)

    bases = [HEADER.unpack_from(batch.data)[0] for batch in split(served(11, [records]))]

    assert [10, 13] == bases
