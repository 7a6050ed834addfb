"""The log's HTTP surface: produce, consume, topics, groups. Thin: decode, ask a role, answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed.auth import Principal
from lakebed.context import Context, Health
from lakebed.errors import Invalid
from lakebed.log import contracts, frame
from lakebed.log.broker import Broker
from lakebed.log.contracts import ConsumeRequest, ProduceRequest
from lakebed.log.fetcher import Want
from lakebed.log.model import Committed, TopicConfig, TopicPartition, check_topic, topic_partition
from lakebed.log.producers import Chunk
from lakebed.log.reader import Fetched
from lakebed.log.steward import Segments
from lakebed.log.writer import Outcome
from lakebed.meta.protocol import Meta
from lakebed.wire import (
    Answered,
    Buffer,
    Call,
    Tell,
    answered,
    check_items,
    decode_json,
    direct,
    json_answer,
    operation,
)

SEGMENTS_MAX = 500  # in one answer: each compacted one is asked for its size
PARTITION_BYTES = 1024 * 1024  # what one partition gives when a consume does not say


class Reason(msgspec.Struct, frozen=True):
    reason: Annotated[str, msgspec.Meta(min_length=1)]


class Trim(msgspec.Struct, frozen=True):
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
    """`memory_s`: how long a partition knows it after its last batch there."""

    producer_id: str
    memory_s: float


class LogRoutes:
    """The log inside a gateway."""

    name = "log"

    def __init__(self, context: Context, meta: Meta | None = None) -> None:
        self.broker = Broker(context, meta)
        self._node, self._trail = context.node, context.trail
        roles = self.broker.settings.roles
        reads = [
            Route("/consume", self._consume, methods=["POST"]),
            Route("/topics", self._topics),
            Route("/topics/{topic}", self._topic),
            Route("/topics/{topic}/partitions/{partition:int}", self._partition),
            Route("/topics/{topic}/partitions/{partition:int}/offset", self._offset),
            Route("/topics/{topic}/partitions/{partition:int}/segments", self._segments),
            Route("/topics/{topic}/groups", self._progress),
            Route("/topics/{topic}/groups/{group}", self._progress),
        ]
        writes = [
            Route("/produce", direct(self._produce, self._produce_promptly), methods=["POST"]),
            Route("/topics/{topic}", self._delete, methods=["DELETE"]),
            Route("/topics/{topic}/config", self._configure, methods=["PUT"]),
            Route("/topics/{topic}/partitions/{partition:int}/fence", self._fence, methods=["POST"]),
            Route("/topics/{topic}/partitions/{partition:int}/unfence", self._unfence, methods=["POST"]),
            Route("/topics/{topic}/partitions/{partition:int}/trim", self._trim, methods=["POST"]),
            Route("/groups/{group}/commit", self._commit, methods=["POST"]),
            Route("/groups/{group}/generation", self._claim, methods=["POST"]),
            Route("/producers", self._producer, methods=["POST"]),
        ]
        self.reads: Sequence[BaseRoute] = reads if roles in ("both", "read") else ()
        self.writes: Sequence[BaseRoute] = writes if roles in ("both", "write") else ()

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        await self.broker.stop()

    async def health(self) -> Health:
        held = self.broker.producer.held_bytes
        full = held > self.broker.settings.buffer_max_bytes * 0.9
        detail = f"roles {self.broker.settings.roles}, {held} bytes buffered"
        return Health("degraded" if full else "ok", detail)

    @operation("Append records to topic-partitions", body=ProduceRequest, answer=contracts.Answer)
    async def _produce(self, call: Call) -> Answered:
        """Answers 200, 409 or 503 with a result for each batch; 400 changes nothing."""
        asked = self._asked(call, await call.body())
        return _told(asked, await self.broker.produce(asked))

    def _produce_promptly(self, call: Call, body: Buffer, tell: Tell) -> None:
        """As `_produce`: the answer is written when its blob is committed, without a task that waits for it."""
        asked = self._asked(call, body)
        self.broker.producer.append(asked, lambda outcomes: tell(partial(_told, asked, outcomes)))

    def _asked(self, call: Call, body: Buffer) -> list[tuple[TopicPartition, Chunk]]:
        limit = self.broker.settings.record_max_bytes
        if call.header(b"content-type").startswith(frame.MEDIA_TYPE):
            asked = [
                contracts.chunk_of(part.topic, part.partition, records, part.producer_id, part.sequence, limit)
                for part, records in frame.decode(body)
            ]
        else:
            wanted = decode_json(body, ProduceRequest, binary=frame.MEDIA_TYPE).topic_partitions
            check_items(sum(len(part.records) for part in wanted), binary=frame.MEDIA_TYPE)
            asked = [contracts.to_chunk(part, limit) for part in wanted]
        self._check(call.principal, "produce", asked)
        return asked

    @operation("Read records from topic-partitions", body=ConsumeRequest, answer=contracts.Answer)
    async def _consume(self, request: Request) -> Response:
        """Waits up to max_wait_ms for min_bytes. Binary when the Accept header asks for it."""
        asked = decode_json(await request.body(), ConsumeRequest)
        settings = self.broker.settings
        bytes_max = min(asked.max_bytes or settings.max_bytes, settings.max_bytes)
        wants = [
            Want(
                topic_partition(part.topic, part.partition),
                part.fetch_offset,
                min(part.partition_max_bytes or PARTITION_BYTES, bytes_max),
            )
            for part in asked.topic_partitions
        ]
        self._check(request.state.principal, "consume", [(want.tp, None) for want in wants])
        found = await self.broker.consume(
            wants,
            bytes_max=bytes_max,
            bytes_min=min(asked.min_bytes, bytes_max),
            wait_s=min(asked.max_wait_ms, settings.max_wait_ms) / 1000,
        )
        as_json = frame.MEDIA_TYPE not in request.headers.get("accept", "")
        results = [contracts.consumed(want.tp, each, as_json=as_json) for want, each in zip(wants, found, strict=True)]
        answer, status, headers = contracts.answer(results), contracts.status(found), contracts.headers(found)
        if as_json:
            return json_answer(answer, status, headers)
        parts = [each.parts if isinstance(each, Fetched) else () for each in found]
        return Response(frame.encode_grouped(answer, parts), status, headers, media_type=frame.MEDIA_TYPE)

    async def _topics(self, request: Request) -> Response:
        """Every topic with its partitions."""
        request.state.principal.demand("log:read")
        topics: dict[str, list[int]] = {}
        for tp in await self.broker.steward.partitions():
            topics.setdefault(tp.topic, []).append(tp.partition)
        return json_answer({"topics": [{"topic": topic, "partitions": found} for topic, found in topics.items()]})

    async def _topic(self, request: Request) -> Response:
        """A topic's partitions and how much is in them."""
        topic = self._topic_of(request, "read")
        tps = await self.broker.steward.partitions(topic)
        rows = [await self.broker.steward.describe(tp) for tp in tps]
        config = await self.broker.steward.config(topic)
        return json_answer({"topic": topic, "partitions": rows, "config": config}, 200 if rows else 404)

    async def _partition(self, request: Request) -> Response:
        return json_answer(await self.broker.steward.describe(self._tp(request, "read")))

    async def _offset(self, request: Request) -> Response:
        """The first offset appended at `at_ms` or later."""
        tp = self._tp(request, "read")
        try:
            at_ms = int(request.query_params["at_ms"])
        except (KeyError, ValueError) as error:
            raise Invalid("at_ms must be a time in milliseconds") from error
        return json_answer({"offset": await self.broker.steward.offset_at(tp, at_ms)})

    @operation("Where a partition's records lie", answer=Segments)
    async def _segments(self, request: Request) -> Response:
        """WAL slices, compacted blobs and the pending append, from `from_offset` on, at most `limit` of them."""
        tp = self._tp(request, "read")
        start, limit = _number(request, "from_offset", 0), _number(request, "limit", 100)
        if not 1 <= limit <= SEGMENTS_MAX:
            raise Invalid(f"limit must be 1 to {SEGMENTS_MAX}")
        return json_answer(await self.broker.steward.segments(tp, from_offset=start, limit=limit))

    async def _progress(self, request: Request) -> Response:
        """Committed offsets and lag, of one group or of all."""
        topic = self._topic_of(request, "read")
        rows = await self.broker.groups.progress(topic, request.path_params.get("group", ""))
        return json_answer({"groups": rows})

    @operation("Commit a group's offsets", body=CommitRequest)
    async def _commit(self, request: Request) -> Response:
        """Each partition on its own, in order: an error leaves those before it committed, and may be repeated whole."""
        asked = decode_json(await request.body(), CommitRequest).topic_partitions
        tps = [topic_partition(part.topic, part.partition) for part in asked]
        self._check(request.state.principal, "consume", [(tp, None) for tp in tps])
        group = request.path_params["group"]
        rows: list[Any] = []
        for tp, part in zip(tps, asked, strict=True):
            made = await self.broker.groups.commit(
                group, tp, part.offset, note=part.note, generation=part.generation, seek=part.seek
            )
            rows.append(_standing(tp, made))
        return json_answer({"group": group, "committed": rows})

    @operation("Take over a group's partitions", body=ClaimRequest)
    async def _claim(self, request: Request) -> Response:
        """Gives each partition's next generation and committed offset (0: none). Earlier generations are refused."""
        asked = decode_json(await request.body(), ClaimRequest).topic_partitions
        tps = [topic_partition(part.topic, part.partition) for part in asked]
        self._check(request.state.principal, "consume", [(tp, None) for tp in tps])
        group = request.path_params["group"]
        rows = [_standing(tp, await self.broker.groups.claim(group, tp)) for tp in tps]
        return json_answer({"group": group, "claimed": rows})

    @operation("Issue a producer id", answer=ProducerId)
    async def _producer(self, request: Request) -> Response:
        """A UUID of version 7. Nothing is stored: a client may make one itself."""
        return json_answer(ProducerId(self.broker.producer_id(), self.broker.settings.producer_memory_s))

    @operation("Refuse every append from now on", body=Reason)
    async def _fence(self, request: Request) -> Response:
        tp = self._tp(request, "admin")
        reason = decode_json(await request.body(), Reason).reason
        async with self._trail.record(request.state.principal.name, "log.fence", _subject(tp), reason):
            return json_answer(await self.broker.steward.fence(tp, reason=reason))

    @operation("Take appends again")
    async def _unfence(self, request: Request) -> Response:
        tp = self._tp(request, "admin")
        async with self._trail.record(request.state.principal.name, "log.unfence", _subject(tp)):
            return json_answer(await self.broker.steward.unfence(tp))

    @operation("Drop the records below an offset", body=Trim)
    async def _trim(self, request: Request) -> Response:
        tp = self._tp(request, "admin")
        before = decode_json(await request.body(), Trim).before_offset
        subject = _subject(tp) | {"before": str(before)}
        async with self._trail.record(request.state.principal.name, "log.trim", subject):
            after = await self.broker.steward.trim(tp, before)
        self.broker.fetcher.forget(tp)
        return json_answer(after)

    @operation("Delete a topic", body=Reason)
    async def _delete(self, request: Request) -> Response:
        topic = self._topic_of(request, "admin")
        reason = decode_json(await request.body(), Reason).reason
        async with self._trail.record(request.state.principal.name, "log.delete", {"topic": topic}, reason):
            tps = await self.broker.steward.delete(topic, reason=reason)
        for tp in tps:
            self.broker.fetcher.forget(tp)
        return json_answer({"topic": topic, "deleted": [tp.partition for tp in tps]})

    @operation("Set what is kept of a topic", body=TopicConfig)
    async def _configure(self, request: Request) -> Response:
        topic = self._topic_of(request, "admin")
        config = decode_json(await request.body(), TopicConfig)
        said = msgspec.json.encode(config).decode()
        async with self._trail.record(request.state.principal.name, "log.configure", {"topic": topic}) as told:
            await self.broker.steward.configure(topic, config)
            told.detail = said
        return json_answer(config)

    def _check(self, principal: Principal, verb: str, asked: Sequence[tuple[TopicPartition, Chunk | None]]) -> None:
        limit = self.broker.settings.request_max_partitions
        if len(asked) > limit:
            raise Invalid(f"{len(asked)} topic-partitions in one request; {limit} is the limit")
        for topic in {tp.topic for tp, _ in asked}:
            principal.demand(f"log:{verb}:{topic}")

    def _topic_of(self, request: Request, verb: str) -> str:
        topic = check_topic(request.path_params["topic"])
        request.state.principal.demand(f"log:{verb}:{topic}")
        return topic

    def _tp(self, request: Request, verb: str) -> TopicPartition:
        return topic_partition(self._topic_of(request, verb), request.path_params["partition"])


def _told(asked: Sequence[tuple[TopicPartition, Chunk]], outcomes: Sequence[Outcome]) -> Answered:
    results = [contracts.produced(tp, outcome) for (tp, _), outcome in zip(asked, outcomes, strict=True)]
    return answered(contracts.answer(results), contracts.status(outcomes), contracts.headers(outcomes))


def _standing(tp: TopicPartition, made: Committed) -> dict[str, Any]:
    return {"topic": tp.topic, "partition": tp.partition, "offset": made.offset, "generation": made.generation}


def _subject(tp: TopicPartition) -> dict[str, str]:
    return {"topic": tp.topic, "partition": str(tp.partition)}


def _number(request: Request, name: str, otherwise: int) -> int:
    said = request.query_params.get(name, str(otherwise))
    if not said.isdecimal() or len(said) > 18:
        raise Invalid(f"{name} must be a number of 0 or more, not {said[:40]!r}")
    return int(said)


def component(context: Context) -> LogRoutes:
    return LogRoutes(context)
