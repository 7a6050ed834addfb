"""Produce, Fetch, ListOffsets and InitProducerId: record batches in, record batches out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from kio.schema.errors import ErrorCode

from lakebed.core.clock import now_ms
from lakebed.core.errors import Corrupt, LakebedError, Overloaded, TooLarge
from lakebed.core.quotas import count_records
from lakebed.log import kafka_batch
from lakebed.log.brokers import BrokerRecord, preferred
from lakebed.log.codec import Records
from lakebed.log.fetcher import FetchRequest
from lakebed.log.kafka.faults import TransactionRefused, code_of, fetch_code_of
from lakebed.log.kafka.service import KafkaServices, RequestInfo
from lakebed.log.kafka_batch import BASE, CONTROL, TRANSACTIONAL, KafkaRecords, encode_values, kafka_records
from lakebed.log.kafka_compression import Buffer
from lakebed.log.model import TopicPartition, topic_partition
from lakebed.log.producers import RecordChunk, kafka_stamp, new_kafka_id
from lakebed.log.reader import Fetched
from lakebed.log.writer import Outcome

EARLIEST, LATEST = -2, -1  # instead of a time, in ListOffsets
PARTITIONS_MAX = 10_000  # of one request; a client retries the others
REDIRECTS = 11  # the first version of Fetch whose answer can name another broker

Answer = Mapping[str, Any]


class DataRequests:
    def __init__(self, services: KafkaServices) -> None:
        self._services, self._broker, self._settings = services, services.broker, services.broker.settings

    async def over_quota(self, request: Any, info: RequestInfo) -> Mapping[str, LakebedError]:
        """The topics of a Produce that its key may not create."""
        return await self._broker.topic_quota.over(info.principal, {topic.name for topic in request.topic_data})

    def produce(self, request: Any, info: RequestInfo, over: Mapping[str, LakebedError]) -> asyncio.Future[Answer]:
        """Appends before it returns, so that the requests of a connection keep their order; answers later."""
        wanted = [(topic.name, part) for topic in request.topic_data for part in topic.partition_data]
        chunks: list[tuple[TopicPartition, RecordChunk] | LakebedError] = []
        for number, (topic, part) in enumerate(wanted):
            try:
                _check_count(number)
                self._services.demand(info, "produce", topic)
                if topic in over:
                    raise over[topic]
                if request.transactional_id is not None:
                    raise TransactionRefused
                chunks.append((topic_partition(topic, part.index), self._chunk(part.records or b"")))
            except LakebedError as error:
                chunks.append(error)
        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def respond(outcomes: Sequence[Outcome]) -> None:
            if not done.done():
                done.set_result(_produced(wanted, chunks, outcomes))

        good = _kept([chunk for chunk in chunks if not isinstance(chunk, LakebedError)])
        count_records(sum(chunk.records.count for _, chunk in good))
        if good:
            self._broker.producer.append(good, respond)
        else:
            respond([])
        return done

    def _chunk(self, data: Buffer) -> RecordChunk:
        """Raises Corrupt for damaged batches, TooLarge and TransactionRefused."""
        if len(data) > self._settings.record_max_bytes:
            raise TooLarge(f"{len(data)} bytes are more than log.record_max_bytes")
        batches = kafka_batch.checked(data)
        if any(batch.attributes & (TRANSACTIONAL | CONTROL) for batch in batches):
            raise TransactionRefused
        records = kafka_records(batches, data)
        first = batches[0]
        if first.producer_id < 0:
            return RecordChunk(records)
        if len(batches) > 1:
            raise Corrupt("an idempotent producer sends one batch for a partition at a time")
        return RecordChunk(records, kafka_stamp(first.producer_id, first.producer_epoch, first.sequence))

    async def fetch(self, request: Any, info: RequestInfo) -> Answer:
        """Waits up to max_wait for min_bytes. Without sessions: a client names all its partitions each time.

        A consumer of another zone (`client.rack`) is sent to a broker of its own zone, where there is one. A broker
        that only writes sends every consumer to one that reads.
        """
        near = self._near(getattr(request, "rack_id", ""), redirects=info.version >= REDIRECTS)
        limit = max(1, min(getattr(request, "max_bytes", self._settings.max_bytes), self._settings.max_bytes))
        asked = [(topic.topic, part) for topic in request.topics for part in topic.partitions]
        found: dict[int, Fetched | LakebedError] = {}
        wants: dict[int, FetchRequest] = {}
        for number, (topic, part) in enumerate(asked):
            try:
                _check_count(number)
                (self._services.demand_right if near else self._services.demand)(info, "consume", topic)
                share = max(1, min(part.partition_max_bytes, limit))
                wants[number] = FetchRequest(topic_partition(topic, part.partition), part.fetch_offset, share)
            except LakebedError as error:
                found[number] = error
        if wants and not near:
            wait_s = 0.0 if found else min(request.max_wait.total_seconds(), self._settings.max_wait_ms / 1000)
            answers = await self._broker.consume(
                list(wants.values()), bytes_max=limit, bytes_min=min(max(0, request.min_bytes), limit), wait_s=wait_s
            )
            found |= dict(zip(wants, answers, strict=True))
        topics: dict[str, list[Answer]] = {}
        for number, (topic, part) in enumerate(asked):
            row = _fetched(part.partition, found[number]) if number in found else _elsewhere(wants[number].tp, near)
            topics.setdefault(topic, []).append(row)
        return {"responses": [{"topic": topic, "partitions": parts} for topic, parts in topics.items()]}

    def _near(self, zone: str, *, redirects: bool) -> list[BrokerRecord]:
        """The brokers that this client's consumers are sent to; none where this one serves them."""
        registry = self._services.registry
        if not redirects or (registry.me.reads and (not zone or registry.me.zone == zone)):
            return []
        able = [broker for broker in registry.living if broker.kafka and broker.reads]
        return [broker for broker in able if broker.zone == zone] or ([] if registry.me.reads else able)

    async def list_offsets(self, request: Any, info: RequestInfo) -> Answer:
        topics = []
        for topic in request.topics:
            parts = [await self._offset(topic.name, part, info) for part in topic.partitions]
            topics.append({"name": topic.name, "partitions": parts})
        return {"topics": topics}

    async def _offset(self, topic: str, part: Any, info: RequestInfo) -> Answer:
        answer = {"partition_index": part.partition_index, "timestamp": -1, "offset": -1, "leader_epoch": -1}
        try:
            self._services.demand_right(info, "consume", topic)  # also of a broker that sends consumers on
            tp = topic_partition(topic, part.partition_index)
            if part.timestamp in (EARLIEST, LATEST):
                now = await self._broker.reader.control(tp)
                return {**answer, "offset": now.log_start_offset if part.timestamp == EARLIEST else now.next_offset}
            found = await self._broker.admin.offsets.stamped(tp, part.timestamp)
            return {**answer, "offset": found[0], "timestamp": found[1]} if found is not None else answer
        except LakebedError as error:
            return {**answer, "error_code": fetch_code_of(error)}

    async def init_producer_id(self, request: Any, info: RequestInfo) -> Answer:
        """An id that carries its time; nothing is stored. Transactions are refused."""
        if request.transactional_id is not None:
            return {"error_code": code_of(TransactionRefused()), "producer_id": -1, "producer_epoch": -1}
        context = self._services.context
        random = int(context.ids.uuid().replace("-", "")[-8:], 16)
        return {"producer_id": new_kafka_id(now_ms(context.clock), random), "producer_epoch": 0}


def _check_count(number: int) -> None:
    if number >= PARTITIONS_MAX:
        raise Overloaded(f"more than {PARTITIONS_MAX} partitions in one request", hint="ask for fewer at a time")


def _kept(chunks: list[tuple[TopicPartition, RecordChunk]]) -> list[tuple[TopicPartition, RecordChunk]]:
    """Records that are views on their request keep all of it in memory: where most of it is no record, copies."""
    whole = {
        memoryview(view.obj).nbytes for _, chunk in chunks if isinstance(view := chunk.records.payload, memoryview)
    }
    if 2 * sum(chunk.records.size for _, chunk in chunks) >= sum(whole):
        return chunks
    return [(tp, RecordChunk(KafkaRecords(c.records.count, bytes(c.records.payload)), c.stamp)) for tp, c in chunks]


def _produced(
    wanted: Sequence[tuple[str, Any]],
    chunks: Sequence[tuple[TopicPartition, RecordChunk] | LakebedError],
    outcomes: Sequence[Outcome],
) -> Answer:
    left = iter(outcomes)
    topics: dict[str, list[Answer]] = {}
    for (topic, part), chunk in zip(wanted, chunks, strict=True):
        outcome = chunk if isinstance(chunk, LakebedError) else next(left)
        row: dict[str, Any] = {"index": part.index, "base_offset": -1, "log_append_time": None, "log_start_offset": -1}
        if isinstance(outcome, LakebedError):
            row |= {"error_code": code_of(outcome), "error_message": outcome.message}
        else:
            row |= {"error_code": ErrorCode.none, "base_offset": outcome.start_offset, "log_start_offset": 0}
        topics.setdefault(topic, []).append(row)
    return {"responses": [{"name": topic, "partition_responses": rows} for topic, rows in topics.items()]}


def _elsewhere(tp: TopicPartition, near: Sequence[BrokerRecord]) -> Answer:
    """No records: the client fetches them from the broker that is named."""
    broker = preferred(str(tp), near)
    return {
        "partition_index": tp.partition,
        "error_code": ErrorCode.none,
        "high_watermark": -1,
        "last_stable_offset": -1,
        "log_start_offset": -1,
        "aborted_transactions": None,
        "preferred_read_replica": broker.kafka_id if broker is not None else -1,
        "records": b"",
    }


def _fetched(partition: int, found: Fetched | LakebedError) -> Answer:
    if isinstance(found, LakebedError):
        return {
            "partition_index": partition,
            "error_code": fetch_code_of(found),
            "high_watermark": found.detail.get("high_watermark", -2) + 1,
            "log_start_offset": found.detail.get("log_start_offset", -1),
            "aborted_transactions": None,
            "records": b"",
        }
    end = found.high_watermark + 1
    return {
        "partition_index": partition,
        "error_code": ErrorCode.none,
        "high_watermark": end,
        "last_stable_offset": end,
        "log_start_offset": found.log_start_offset,
        "aborted_transactions": None,
        "records": served(found.start_offset, found.parts),
    }


def served(offset: int, parts: Sequence[Records]) -> bytes:
    """Record batches with their offsets. The first may begin before `offset`: clients skip what they did not ask."""
    out: list[bytes | memoryview] = []
    for part in parts:
        if isinstance(part, KafkaRecords):
            base = offset - part.skip
            for batch in part.batches():
                out += batch.at(base)
                base += batch.count
        else:
            out += [BASE.pack(offset), encode_values(list(part), part.at_ms)[BASE.size :]]
        offset += part.count
    return b"".join(out)
