"""One connection of Kafka's protocol, request by request, with every field under the test's control."""

from __future__ import annotations

import asyncio
import io
import struct
from typing import Any

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from lakebed.log import kafka_batch
from lakebed.log.kafka.wire import APIS, shaped
from lakebed.log.kafka_batch import KafkaRecord

ANSWER_S = 30.0


class KafkaClient:
    """One connection, request by request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._correlation = 0

    async def ask(self, name: str, version: int, **fields: Any) -> Any:
        self.send(name, version, **fields)
        return await self.answer(name, version)

    def send(self, name: str, version: int, **fields: Any) -> None:
        key = next(api.key for api in APIS if api.name == name)
        kind = load_request_schema(key, version)
        head = kind.__header_schema__
        self._correlation += 1
        out = io.BytesIO()
        of_head = {"request_api_key": key, "request_api_version": version, "correlation_id": self._correlation}
        entity_writer(head)(out, shaped(head, {**of_head, "client_id": "test"}))
        entity_writer(kind)(out, shaped(kind, fields))
        self.raw(struct.pack(">i", len(out.getvalue())) + out.getvalue())

    def raw(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self, name: str, version: int) -> Any:
        key = next(api.key for api in APIS if api.name == name)
        kind = load_response_schema(key, version)
        async with asyncio.timeout(ANSWER_S):
            (length,) = struct.unpack(">i", await self._reader.readexactly(4))
            data = await self._reader.readexactly(length)
        _, at = entity_reader(kind.__header_schema__)(data, 0)
        return entity_reader(kind)(data, at)[0]

    def has_answer(self) -> bool:
        """Whether bytes have come that nobody has read."""
        return bool(self._reader._buffer)  # type: ignore[attr-defined]

    def close(self) -> None:
        self._writer.close()

    async def sign_in(self, name: str, secret: str) -> Any:
        """SASL PLAIN; the code of its answer."""
        await self.ask("sasl_handshake", 1, mechanism="PLAIN")
        return (await self.ask("sasl_authenticate", 2, auth_bytes=f"\0{name}\0{secret}".encode())).error_code

    async def closed(self) -> bool:
        async with asyncio.timeout(ANSWER_S):
            return b"" == await self._reader.read(1)


def batch(*values: str) -> bytes:
    return kafka_batch.encode([KafkaRecord(value.encode(), b"k") for value in values], now_ms=5)


def sent(records: bytes, topic: str = "orders", partition: int = 0) -> dict[str, Any]:
    parts = [{"index": partition, "records": records}]
    return {"acks": -1, "transactional_id": None, "topic_data": [{"name": topic, "partition_data": parts}]}
