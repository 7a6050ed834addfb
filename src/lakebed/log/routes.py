"""The log's HTTP routes: produce, consume, topics, groups. Thin: decode, call a role, respond.

Each is also served without `/v1`: the original design has `/produce` and `/consume`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed.core.auth import Principal
from lakebed.core.clock import now_ms
from lakebed.core.context import Context, Health
from lakebed.core.errors import Invalid
from lakebed.core.http import (
    Buffer,
    DirectRequest,
    DirectResponse,
    Respond,
    check_items,
    decode_json,
    direct,
    direct_response,
    json_response,
    operation,
    with_aliases,
)
from lakebed.core.quotas import count_records
from lakebed.gateway.state import PortAccess
from lakebed.log import contracts
from lakebed.log.admin import SegmentPage
from lakebed.log.broker import Broker
from lakebed.log.contracts import ConsumeRequest, ProduceRequest
from lakebed.log.fetcher import FetchRequest
from lakebed.log.model import TopicConfig, TopicPartition, check_topic, topic_partition
from lakebed.log.notices import OWNER_HEADER
from lakebed.log.producers import RecordChunk
from lakebed.log.reader import Fetched
from lakebed.log.writer import Outcome
from lakebed.meta.protocol import Meta

if TYPE_CHECKING:
    from lakebed.log.kafka.server import KafkaServer

SEGMENTS_MAX = 500  # in one response: the size of each compacted one costs a request
PARTITIONS_MAX = 1000  # topic-partitions in one request: bounds the work that one request can cause
PARTITION_BYTES = 1024 * 1024  # default of partition_max_bytes


class ReasonRequest(msgspec.Struct, frozen=True):
    reason: Annotated[str, msgspec.Meta(min_length=1)]


class TrimRequest(msgspec.Struct, frozen=True):
    before_offset: int


class CommitPartition(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    offset: int
    note: str = ""
    generation: int | None = None
    seek: bool = False


class CommitRequest(msgspec.Struct, frozen=True):
    topic_partitions: Annotated[list[CommitPartition], msgspec.Meta(min_length=1)]


class ClaimPartition(msgspec.Struct, frozen=True):
    topic: str
    partition: int


class ClaimRequest(msgspec.Struct, frozen=True):
    topic_partitions: Annotated[list[ClaimPartition], msgspec.Meta(min_length=1)]


class ProducerId(msgspec.Struct, frozen=True):
    """`memory_s`: how long a partition remembers it after its last batch."""

    producer_id: str
    memory_s: float


class LogRoutes:
    """The log in a gateway."""

    name = "log"

    def __init__(self, context: Context, meta: Meta | None = None) -> None:
        self.broker = Broker(context, meta)
        self._context = context
        self._access: PortAccess  # given by the gateway, before the start
        self._kafka: KafkaServer | None = None
        self._node, self._trail, self._clock = context.node, context.trail, context.clock
        roles = self.broker.settings.roles
        reads = [
            Route("/v1/consume", self._consume, methods=["POST"]),
            Route("/v1/topics", self._topics),
            Route("/v1/topics/{topic}", self._topic),
            Route("/v1/topics/{topic}/partitions/{partition:int}", self._partition),
            Route("/v1/topics/{topic}/partitions/{partition:int}/offset", self._offset),
            Route("/v1/topics/{topic}/partitions/{partition:int}/segments", self._segments),
            Route("/v1/topics/{topic}/groups", self._progress),
            Route("/v1/topics/{topic}/groups/{group}", self._progress),
        ]
        writes = [
            Route("/v1/produce", direct(self._produce, self._produce_promptly), methods=["POST"]),
            Route("/v1/topics/{topic}", self._delete, methods=["DELETE"]),
            Route("/v1/topics/{topic}/config", self._configure, methods=["PUT"]),
            Route("/v1/topics/{topic}/partitions/{partition:int}/fence", self._fence, methods=["POST"]),
            Route("/v1/topics/{topic}/partitions/{partition:int}/unfence", self._unfence, methods=["POST"]),
            Route("/v1/topics/{topic}/partitions/{partition:int}/trim", self._trim, methods=["POST"]),
            Route("/v1/groups/{group}/commit", self._commit, methods=["POST"]),
            Route("/v1/groups/{group}/generation", self._claim, methods=["POST"]),
            Route("/v1/producers", self._producer, methods=["POST"]),
        ]
        self.reads: Sequence[BaseRoute] = with_aliases(reads) if roles in ("both", "read") else ()
        self.writes: Sequence[BaseRoute] = with_aliases(writes) if roles in ("both", "write") else ()
        self.reads = [*self.reads, *self.broker.peers.routes]

    def admit_with(self, access: PortAccess) -> None:
        self._access = access

    async def start(self) -> None:
        self.broker.start()
        if self.broker.settings.kafka_port is not None:
            from lakebed.log.kafka.server import serve_kafka  # loads the message schemas: only where they are used

            self._kafka = await serve_kafka(self._context, self.broker, self._access)

    async def stop(self) -> None:
        if self._kafka is not None:
            await self._kafka.stop()
        await self.broker.stop()

    async def health(self) -> Health:
        held = self.broker.producer.held_bytes
        full = held > self.broker.settings.buffer_max_bytes * 0.9
        kafka = f", Kafka on port {self._kafka.port}" if self._kafka is not None else ""
        detail = f"roles {self.broker.settings.roles}, {held} bytes buffered{kafka}"
        return Health("degraded" if full else "ok", detail)

    @operation(
        "Append records to topic-partitions",
        body=ProduceRequest,
        answer=contracts.LogResponse,
        right="log:produce:{topic}",
    )
    async def _produce(self, call: DirectRequest) -> DirectResponse:
        """Responds 200, 409 or 503 with a result for each batch; 400 changes nothing."""
        chunks = self._decode_produce(call, await call.body())
        if call.principal.limits.topics_max:
            await self.broker.topic_quota.check(call.principal, {tp.topic for tp, _ in chunks})
        return self._produce_response(chunks, await self.broker.produce(chunks))

    def _produce_promptly(self, call: DirectRequest, body: Buffer, respond: Respond) -> None:
        """As `_produce`, without a task that waits: the response is written when its blob is committed."""
        if call.principal.limits.topics_max:  # the topics have to be listed, so this one needs a task
            task = asyncio.ensure_future(self._produce(call))
            task.add_done_callback(lambda done: respond(done.result))
            return
        chunks = self._decode_produce(call, body)
        self.broker.producer.append(chunks, lambda outcomes: respond(partial(self._produce_response, chunks, outcomes)))

    def _decode_produce(self, call: DirectRequest, body: Buffer) -> list[tuple[TopicPartition, RecordChunk]]:
        limit = self.broker.settings.record_max_bytes
        if call.header(b"content-type").startswith(contracts.FRAME_MEDIA_TYPE):
            chunks = [
                contracts.chunk_of(part.topic, part.partition, records, part.producer_id, part.sequence, limit)
                for part, records in contracts.decode_frame(body)
            ]
        else:
            wanted = decode_json(body, ProduceRequest, binary=contracts.FRAME_MEDIA_TYPE).topic_partitions
            check_items(sum(len(part.records) for part in wanted), binary=contracts.FRAME_MEDIA_TYPE)
            at_ms = now_ms(self._clock)
            chunks = [contracts.to_chunk(part, limit, at_ms) for part in wanted]
        self._check(call.principal, "produce", chunks)
        count_records(sum(chunk.records.count for _, chunk in chunks))
        return chunks

    @operation(
        "Read records from topic-partitions",
        body=ConsumeRequest,
        answer=contracts.LogResponse,
        right="log:consume:{topic}",
    )
    async def _consume(self, request: Request) -> Response:
        """Waits up to max_wait_ms for min_bytes. Binary when the Accept header asks for it."""
        wanted = decode_json(await request.body(), ConsumeRequest)
        settings = self.broker.settings
        bytes_max = min(wanted.max_bytes or settings.max_bytes, settings.max_bytes)
        wants = [
            FetchRequest(
                topic_partition(part.topic, part.partition),
                part.fetch_offset,
                min(part.partition_max_bytes or PARTITION_BYTES, bytes_max),
            )
            for part in wanted.topic_partitions
        ]
        self._check(request.state.principal, "consume", [(want.tp, None) for want in wants])
        found = await self.broker.consume(
            wants,
            bytes_max=bytes_max,
            bytes_min=min(wanted.min_bytes, bytes_max),
            wait_s=min(wanted.max_wait_ms, settings.max_wait_ms) / 1000,
        )
        as_json = contracts.FRAME_MEDIA_TYPE not in request.headers.get("accept", "")
        found = contracts.readable(found, as_json=as_json)
        results = [contracts.consumed(want.tp, each, as_json=as_json) for want, each in zip(wants, found, strict=True)]
        answer, status = contracts.response(results), contracts.status(found)
        headers = contracts.headers(found) | self._owner_header([want.tp for want in wants], writes=False)
        if as_json:
            return json_response(answer, status, headers)
        parts = [each.parts if isinstance(each, Fetched) else () for each in found]
        frame = contracts.encode_frame_groups(answer, parts)
        return Response(frame, status, headers, media_type=contracts.FRAME_MEDIA_TYPE)

    @operation(right="log:read")
    async def _topics(self, request: Request) -> Response:
        """All topics with their partitions."""
        principal: Principal = request.state.principal
        principal.demand_list("log:read")
        topics: dict[str, list[int]] = {}
        for tp in filter(lambda tp: principal.owns(tp.topic), await self.broker.admin.partitions()):
            topics.setdefault(tp.topic, []).append(tp.partition)
        return json_response({"topics": [{"topic": topic, "partitions": found} for topic, found in topics.items()]})

    @operation(right="log:read:{topic}")
    async def _topic(self, request: Request) -> Response:
        """A topic's partitions, their offsets and record counts."""
        topic = self._topic_of(request, "read")
        rows = [await self.broker.admin.describe(tp) for tp in await self.broker.admin.existing(topic)]
        return json_response({"topic": topic, "partitions": rows, "config": await self.broker.admin.config(topic)})

    @operation(right="log:read:{topic}")
    async def _partition(self, request: Request) -> Response:
        return json_response(await self.broker.admin.describe(self._tp(request, "read")))

    @operation(right="log:read:{topic}")
    async def _offset(self, request: Request) -> Response:
        """The first offset appended at `at_ms` or later."""
        tp = self._tp(request, "read")
        try:
            at_ms = int(request.query_params["at_ms"])
        except (KeyError, ValueError) as error:
            raise Invalid("at_ms must be a time in milliseconds") from error
        return json_response({"offset": await self.broker.admin.offsets.at(tp, at_ms)})

    @operation("List where a partition's records are stored", answer=SegmentPage, right="log:read:{topic}")
    async def _segments(self, request: Request) -> Response:
        """WAL slices, compacted blobs and the pending append, from `from_offset` on, at most `limit` of them."""
        tp = self._tp(request, "read")
        start, limit = _number(request, "from_offset", 0), _number(request, "limit", 100)
        if not 1 <= limit <= SEGMENTS_MAX:
            raise Invalid(f"limit must be 1 to {SEGMENTS_MAX}")
        return json_response(await self.broker.admin.segments(tp, from_offset=start, limit=limit))

    @operation(right="log:read:{topic}")
    async def _progress(self, request: Request) -> Response:
        """Committed offsets and lag, of one group or of all."""
        topic = self._topic_of(request, "read")
        rows = await self.broker.groups.progress(topic, request.path_params.get("group", ""))
        return json_response({"groups": [row for row in rows if request.state.principal.owns(row.group)]})

    @operation("Commit a group's offsets", body=CommitRequest, right="log:group:{group}")
    async def _commit(self, request: Request) -> Response:
        """Commits one partition after another; after an error, earlier ones stay committed. A retry is safe. Also
        demands log:consume:{topic}.
        """
        group = self._group_of(request)
        wanted = decode_json(await request.body(), CommitRequest).topic_partitions
        tps = [topic_partition(part.topic, part.partition) for part in wanted]
        self._check(request.state.principal, "consume", [(tp, None) for tp in tps])
        rows: list[Any] = []
        for tp, part in zip(tps, wanted, strict=True):
            made = await self.broker.groups.commit(
                group, tp, part.offset, note=part.note, generation=part.generation, seek=part.seek
            )
            rows.append(contracts.offset_row(tp, made))
        return json_response({"group": group, "committed": rows})

    @operation("Claim a group's partitions", body=ClaimRequest, right="log:group:{group}")
    async def _claim(self, request: Request) -> Response:
        """Gives each partition's next generation and committed offset (0: none). Earlier generations are refused.

        Also demands log:consume:{topic}.
        """
        group = self._group_of(request)
        wanted = decode_json(await request.body(), ClaimRequest).topic_partitions
        tps = [topic_partition(part.topic, part.partition) for part in wanted]
        self._check(request.state.principal, "consume", [(tp, None) for tp in tps])
        rows = [contracts.offset_row(tp, await self.broker.groups.claim(group, tp)) for tp in tps]
        return json_response({"group": group, "claimed": rows})

    @operation("Issue a producer id", answer=ProducerId)
    async def _producer(self, request: Request) -> Response:
        """A UUID of version 7. Nothing is stored: a client may create one itself."""
        return json_response(ProducerId(self.broker.producer_id(), self.broker.settings.producer_memory_s))

    @operation("Refuse every append from now on", body=ReasonRequest, right="log:admin:{topic}")
    async def _fence(self, request: Request) -> Response:
        tp = self._tp(request, "admin")
        reason = decode_json(await request.body(), ReasonRequest).reason
        async with self._trail.record(request.state.principal.name, "log.fence", contracts.subject(tp), reason):
            return json_response(await self.broker.admin.fence(tp, reason=reason))

    @operation("Accept appends again", right="log:admin:{topic}")
    async def _unfence(self, request: Request) -> Response:
        tp = self._tp(request, "admin")
        async with self._trail.record(request.state.principal.name, "log.unfence", contracts.subject(tp)):
            return json_response(await self.broker.admin.unfence(tp))

    @operation("Drop the records below an offset", body=TrimRequest, right="log:admin:{topic}")
    async def _trim(self, request: Request) -> Response:
        tp = self._tp(request, "admin")
        before = decode_json(await request.body(), TrimRequest).before_offset
        subject = contracts.subject(tp) | {"before": str(before)}
        async with self._trail.record(request.state.principal.name, "log.trim", subject):
            after = await self.broker.admin.trim(tp, before)
        self.broker.fetcher.forget(tp)
        return json_response(after)

    @operation("Delete a topic", body=ReasonRequest, right="log:admin:{topic}")
    async def _delete(self, request: Request) -> Response:
        topic = self._topic_of(request, "admin")
        reason = decode_json(await request.body(), ReasonRequest).reason
        async with self._trail.record(request.state.principal.name, "log.delete", {"topic": topic}, reason):
            tps = await self.broker.admin.delete(topic, reason=reason)
        for tp in tps:
            self.broker.fetcher.forget(tp)
        return json_response({"topic": topic, "deleted": [tp.partition for tp in tps]})

    @operation("Set a topic's retention", body=TopicConfig, right="log:admin:{topic}")
    async def _configure(self, request: Request) -> Response:
        topic = self._topic_of(request, "admin")
        config = decode_json(await request.body(), TopicConfig)
        detail = msgspec.json.encode(config).decode()
        async with self._trail.record(request.state.principal.name, "log.configure", {"topic": topic}) as action:
            await self.broker.admin.configure(topic, config)
            action.detail = detail
        return json_response(config)

    def _produce_response(
        self, chunks: Sequence[tuple[TopicPartition, RecordChunk]], outcomes: Sequence[Outcome]
    ) -> DirectResponse:
        results = [contracts.produced(tp, outcome) for (tp, _), outcome in zip(chunks, outcomes, strict=True)]
        headers = contracts.headers(outcomes) | self._owner_header([tp for tp, _ in chunks], writes=True)
        return direct_response(contracts.response(results), contracts.status(outcomes), headers)

    def _owner_header(self, tps: Sequence[TopicPartition], *, writes: bool) -> dict[str, str]:
        """Names the broker that owns these partitions, when it is another one: batches there are larger."""
        better = self.broker.peers.better(tps, writes=writes)
        return {OWNER_HEADER: better} if better else {}

    def _check(
        self, principal: Principal, verb: str, wanted: Sequence[tuple[TopicPartition, RecordChunk | None]]
    ) -> None:
        if len(wanted) > PARTITIONS_MAX:
            raise Invalid(f"{len(wanted)} topic-partitions in one request; {PARTITIONS_MAX} is the limit")
        for topic in {tp.topic for tp, _ in wanted}:
            principal.demand(f"log:{verb}:{topic}")

    def _group_of(self, request: Request) -> str:
        """A group belongs to those who may commit for it: moving its offsets skips or repeats others' records."""
        group = str(request.path_params["group"])
        request.state.principal.demand(f"log:group:{group}")
        return group

    def _topic_of(self, request: Request, verb: str) -> str:
        topic = check_topic(request.path_params["topic"])
        request.state.principal.demand(f"log:{verb}:{topic}")
        return topic

    def _tp(self, request: Request, verb: str) -> TopicPartition:
        return topic_partition(self._topic_of(request, verb), request.path_params["partition"])


def _number(request: Request, name: str, otherwise: int) -> int:
    text = request.query_params.get(name, str(otherwise))
    if text.isdecimal() and len(text) <= 18:
        return int(text)
    raise Invalid(f"{name} must be a number of 0 or more, not {text[:40]!r}")


def component(context: Context) -> LogRoutes:
    return LogRoutes(context)
