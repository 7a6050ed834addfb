"""The queue over HTTP.

POST /v1/queues/{name}/entries        enqueue; responds when the entries are durable (Idempotency-Key: any text)
POST /v1/queues/{name}/claims         claim batches; waits up to wait_s for one
POST /v1/queues/{name}/claims/{claim}/ack       the batch is processed
POST /v1/queues/{name}/claims/{claim}/extend    keep it for another timeout
POST /v1/queues/{name}/claims/{claim}/reject    deliver it again later, or make it a dead letter
GET  /v1/queues                       the status of every queue
GET  /v1/queues/{name}                one queue
GET  /v1/queues/{name}/dead-letters   its dead letters
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed.core.context import Context, Health
from lakebed.core.errors import Corrupt, Invalid, NotFound, Overloaded, TooLarge, UnsupportedEncoding
from lakebed.core.http import check_items, decode_json, json_response, operation
from lakebed.core.quotas import count_records
from lakebed.queue import codec, paths
from lakebed.queue.ingestor import Ingestor, key_hash
from lakebed.queue.model import DeadLetter, Durable, KeyValueEntry, QueueStatus
from lakebed.queue.remote import ClaimToken, QueueClaims
from lakebed.queue.roles import Queue, queue_names
from lakebed.queue.settings import QueueSettings

LETTERS_MAX = 1000  # dead letters in one response
KEY_CHARS_MAX = 200


class QueueBroker:
    """One ingestor per queue, shared by all remote producers, so that their appends are grouped.

    It holds nothing that was acknowledged: a response is sent only when the entries are durable. It can be killed at
    any time, and any number may run beside each other.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._settings = context.settings.of(QueueSettings)
        self._open: OrderedDict[str, tuple[Queue, dict[int, Ingestor]]] = OrderedDict()  # least recently used first
        self._shard = int(context.ids.token(), 16)
        self._claims: OrderedDict[str, QueueClaims] = OrderedDict()

    @property
    def queues(self) -> list[str]:
        return list(self._open)

    def queue(self, name: str) -> Queue:
        """A queue to read; no ingestor is opened for it. Raises Invalid for an invalid name."""
        return self._open[name][0] if name in self._open else Queue.of(self._context, name)

    def claims(self, name: str) -> QueueClaims:
        """The claims of remote consumers on a queue."""
        if name not in self._claims:
            self._claims[name] = QueueClaims(self.queue(name), self._context)
            while len(self._claims) > self._settings.queues_max:
                self._claims.popitem(last=False)
        self._claims.move_to_end(name)
        return self._claims[name]

    async def put(self, name: str, entries: Sequence[KeyValueEntry], key: str = "") -> Durable:
        """Enqueues the entries, together with those of other callers; returns when they are durable.

        Raises Invalid, or Overloaded where an ingestor would wait: a remote producer can retry.
        """
        ingestor = await self._ingestor(name, key)
        if ingestor.unflushed_bytes > self._settings.max_unflushed_bytes:
            raise Overloaded(f"queue {name}: {ingestor.unflushed_bytes} bytes are not durable yet", retry_after_s=1.0)
        watcher = await ingestor.ingest(entries, key=key)
        return await watcher.await_durable()

    async def close(self) -> None:
        """Makes everything durable that was accepted."""
        while self._open:
            _, (_, ingestors) = self._open.popitem()
            for ingestor in ingestors.values():
                await ingestor.close()

    async def _ingestor(self, name: str, key: str = "") -> Ingestor:
        """The ingestor of this gateway's shard; a call with a key always goes to the shard of its key."""
        if name not in self._open:
            queue = Queue.of(self._context, name)
            await self._make_room()
            self._open.setdefault(name, (queue, {}))
        self._open.move_to_end(name)
        queue, ingestors = self._open[name]
        shard = (int.from_bytes(key_hash(key).encode()) if key else self._shard) % queue.settings.shards
        if shard not in ingestors:
            ingestors[shard] = queue.ingestor(shard)
        return ingestors[shard]

    async def _make_room(self) -> None:
        if len(self._open) < self._settings.queues_max:
            return
        for name, (_, ingestors) in self._open.items():
            if all(ingestor.unflushed_bytes == 0 for ingestor in ingestors.values()):
                del self._open[name]
                for ingestor in ingestors.values():
                    await ingestor.close()
                return
        raise Overloaded(f"{len(self._open)} queues are busy, the limit is {self._settings.queues_max}")


class EnqueueResponse(msgspec.Struct, frozen=True):
    """The response when entries are durable. `repeated`: an earlier call with the same key enqueued them."""

    queue: str
    location: str
    sequence: int
    entries: int
    shard: int = 0
    repeated: bool = False


class BatchClaimRequest(msgspec.Struct, frozen=True):
    """Which consumer claims, how many batches, how long it waits for one, and which claims it still has."""

    consumer: str = ""
    max: int = 1
    wait_s: float = 0.0
    held: list[str] = []


class ClaimedEntries(msgspec.Struct, frozen=True):
    """A claimed batch. Store `shard` and `sequence` with the data, and redelivery becomes exactly-once."""

    claim: str
    shard: int
    sequence: int
    entries: list[KeyValueEntry]
    expires_ms: int


class BatchClaimResponse(msgspec.Struct, frozen=True):
    batches: list[ClaimedEntries]


class RejectRequest(msgspec.Struct, frozen=True):
    reason: str = ""


class ClaimOutcome(msgspec.Struct, frozen=True):
    """What became of a claim. `dead`: the batch is a dead letter. `expires_ms`: when an extended claim goes stale."""

    claim: str
    dead: bool = False
    expires_ms: int | None = None


def component(context: Context) -> QueueRoutes:
    return QueueRoutes(context)


class QueueRoutes:
    name = "queue"

    def __init__(self, context: Context) -> None:
        self._store = context.store
        self._settings = context.settings.of(QueueSettings)
        self._broker = QueueBroker(context)

    @property
    def reads(self) -> Sequence[BaseRoute]:
        return [
            Route("/v1/queues", self.all, methods=["GET"]),
            Route("/v1/queues/{name}", self.one, methods=["GET"]),
            Route("/v1/queues/{name}/dead-letters", self.dead_letters, methods=["GET"]),
        ]

    @property
    def writes(self) -> Sequence[BaseRoute]:
        claim = "/v1/queues/{name}/claims/{claim}"
        return [
            Route("/v1/queues/{name}/entries", self.put, methods=["POST"]),
            Route("/v1/queues/{name}/claims", self.claim, methods=["POST"]),
            Route(f"{claim}/ack", self.ack, methods=["POST"]),
            Route(f"{claim}/extend", self.extend, methods=["POST"]),
            Route(f"{claim}/reject", self.reject, methods=["POST"]),
        ]

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        await self._broker.close()

    async def health(self) -> Health:
        return Health("ok", f"open queues: {len(self._broker.queues)}")

    @operation(
        "Enqueue entries; responds when they are durable",
        body=list[KeyValueEntry],
        answer=EnqueueResponse,
        right="queue:write:{name}",
    )
    async def put(self, request: Request) -> Response:
        name = paths.check_name(request.path_params["name"])
        request.state.principal.demand(f"queue:write:{name}")
        entries = self._entries(request.headers.get("content-type", "application/json"), await request.body())
        count_records(len(entries))
        key = request.headers.get("idempotency-key", "")
        if len(key) > KEY_CHARS_MAX:
            raise TooLarge(f"an idempotency key has at most {KEY_CHARS_MAX} characters")
        durable = await self._broker.put(name, entries, key)
        told = EnqueueResponse(name, durable.location, durable.sequence, len(entries), durable.shard, durable.repeated)
        return json_response(told)

    @operation(
        "Claim the next batches of a queue",
        body=BatchClaimRequest,
        answer=BatchClaimResponse,
        right="queue:consume:{name}",
    )
    async def claim(self, request: Request) -> Response:
        queue = await self._existing(request, "consume")
        body = await request.body()
        asked = decode_json(body, BatchClaimRequest) if body else BatchClaimRequest()
        claims = self._broker.claims(queue.name)
        one = request.headers.get("accept", "").startswith(codec.CONTENT_TYPE)
        found = await claims.claim(asked.consumer, count=1 if one else asked.max, wait_s=asked.wait_s, held=asked.held)
        if not one:
            rows = [
                ClaimedEntries(
                    str(ClaimToken.of(batch)),
                    batch.shard,
                    batch.sequence,
                    batch.entries,
                    claims.expires_ms(batch.confirmed_ms),
                )
                for batch in found
            ]
            return json_response(BatchClaimResponse(rows))
        if not found:
            return Response(status_code=204)
        headers = {
            "lakebed-claim": str(ClaimToken.of(found[0])),
            "lakebed-shard": str(found[0].shard),
            "lakebed-sequence": str(found[0].sequence),
        }
        return Response(codec.encode(found[0].entries), media_type=codec.CONTENT_TYPE, headers=headers)

    @operation("Acknowledge a claimed batch", answer=ClaimOutcome, right="queue:consume:{name}")
    async def ack(self, request: Request) -> Response:
        claims, text = await self._claims(request)
        await claims.ack(text)
        return json_response(ClaimOutcome(text))

    @operation("Extend a claim", answer=ClaimOutcome, right="queue:consume:{name}")
    async def extend(self, request: Request) -> Response:
        claims, text = await self._claims(request)
        return json_response(ClaimOutcome(text, expires_ms=await claims.extend(text)))

    @operation("Reject a claimed batch", body=RejectRequest, answer=ClaimOutcome, right="queue:consume:{name}")
    async def reject(self, request: Request) -> Response:
        claims, text = await self._claims(request)
        body = await request.body()
        reason = decode_json(body, RejectRequest).reason if body else ""
        return json_response(ClaimOutcome(text, dead=await claims.reject(text, reason or "rejected over HTTP")))

    async def _claims(self, request: Request) -> tuple[QueueClaims, str]:
        name = paths.check_name(request.path_params["name"])
        request.state.principal.demand(f"queue:consume:{name}")
        return self._broker.claims(name), request.path_params["claim"]

    @operation("Status of every queue", answer=list[QueueStatus], right="queue:read")
    async def all(self, request: Request) -> Response:
        principal = request.state.principal
        principal.demand_list("queue:read")
        found = filter(principal.owns, await queue_names(self._store, self._settings))
        return json_response([await self._broker.queue(name).status() for name in found])

    @operation("Status of one queue", answer=QueueStatus, right="queue:read:{name}")
    async def one(self, request: Request) -> Response:
        return json_response(await (await self._existing(request)).status())

    @operation("The dead letters of a queue", answer=list[DeadLetter], right="queue:read:{name}")
    async def dead_letters(self, request: Request) -> Response:
        queue = await self._existing(request)
        letters: list[DeadLetter] = []
        async for letter in queue.letters():
            letters.append(letter)
            if len(letters) >= LETTERS_MAX:
                break
        return json_response(letters)

    async def _existing(self, request: Request, right: str = "read") -> Queue:
        name = paths.check_name(request.path_params["name"])
        request.state.principal.demand(f"queue:{right}:{name}")
        queue = self._broker.queue(name)
        if not await queue.exists():
            raise NotFound(f"no queue {name}", hint="a queue exists once an entry was put into it")
        return queue

    def _entries(self, content_type: str, body: bytes) -> list[KeyValueEntry]:
        kind = content_type.partition(";")[0].strip().lower()
        if kind == "application/json":
            entries = decode_json(body, list[KeyValueEntry], binary=codec.CONTENT_TYPE)
            check_items(len(entries), binary=codec.CONTENT_TYPE)
            return entries
        if kind == codec.CONTENT_TYPE:
            try:
                return codec.decode(body, bytes_max=self._settings.ingest_bytes_max)
            except Corrupt as error:
                if "bytes" in error.detail:
                    raise TooLarge(error.message, hint="send fewer entries per call") from error
                raise Invalid(error.message, hint="docs/formats/queue.md describes the bytes") from error
        raise UnsupportedEncoding(
            f"content type {kind!r} is not supported", hint=f"send application/json or {codec.CONTENT_TYPE}"
        )
