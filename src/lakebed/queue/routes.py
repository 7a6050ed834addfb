"""The queue over HTTP.

POST /v1/queues/{name}/entries        enqueue; responds when the entries are durable
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
from lakebed.queue import codec, paths
from lakebed.queue.ingestor import Ingestor
from lakebed.queue.model import DeadLetter, Durable, KeyValueEntry, QueueStatus
from lakebed.queue.roles import Queue, queue_names
from lakebed.queue.settings import QueueSettings

LETTERS_MAX = 1000  # dead letters in one response


class QueueBroker:
    """One ingestor per queue, shared by all remote producers, so that their appends are grouped.

    It holds nothing that was acknowledged: a response is sent only when the entries are durable. It can be killed at
    any time, and any number may run beside each other.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._settings = context.settings.of(QueueSettings)
        self._open: OrderedDict[str, tuple[Queue, Ingestor]] = OrderedDict()  # least recently used first

    @property
    def queues(self) -> list[str]:
        return list(self._open)

    def queue(self, name: str) -> Queue:
        """A queue to read; no ingestor is opened for it. Raises Invalid for an invalid name."""
        return self._open[name][0] if name in self._open else Queue.of(self._context, name)

    async def put(self, name: str, entries: Sequence[KeyValueEntry]) -> Durable:
        """Enqueues the entries, together with those of other callers; returns when they are durable.

        Raises Invalid, or Overloaded where an ingestor would wait: a remote producer can retry.
        """
        ingestor = await self._ingestor(name)
        if ingestor.unflushed_bytes > self._settings.max_unflushed_bytes:
            raise Overloaded(f"queue {name}: {ingestor.unflushed_bytes} bytes are not durable yet", retry_after_s=1.0)
        watcher = await ingestor.ingest(entries)
        return await watcher.await_durable()

    async def close(self) -> None:
        """Makes everything durable that was accepted."""
        while self._open:
            _, (_, ingestor) = self._open.popitem()
            await ingestor.close()

    async def _ingestor(self, name: str) -> Ingestor:
        if name not in self._open:
            queue = Queue.of(self._context, name)
            await self._make_room()
            self._open.setdefault(name, (queue, queue.ingestor()))
        self._open.move_to_end(name)
        return self._open[name][1]

    async def _make_room(self) -> None:
        if len(self._open) < self._settings.queues_max:
            return
        for name, (_, ingestor) in self._open.items():
            if ingestor.unflushed_bytes == 0:
                del self._open[name]
                await ingestor.close()
                return
        raise Overloaded(f"{len(self._open)} queues are busy, the limit is {self._settings.queues_max}")


class EnqueueResponse(msgspec.Struct, frozen=True):
    """The response when entries are durable."""

    queue: str
    location: str
    sequence: int
    entries: int


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
        return [Route("/v1/queues/{name}/entries", self.put, methods=["POST"])]

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
        durable = await self._broker.put(name, entries)
        return json_response(EnqueueResponse(name, durable.location, durable.sequence, len(entries)))

    @operation("Status of every queue", answer=list[QueueStatus], right="queue:read")
    async def all(self, request: Request) -> Response:
        request.state.principal.demand("queue:read")
        found = await queue_names(self._store, self._settings)
        return json_response([await self._broker.queue(name).status() for name in found])

    @operation("Status of one queue", answer=QueueStatus, right="queue:read:{name}")
    async def one(self, request: Request) -> Response:
        return json_response(await (await self._existing(request)).status())

    @operation("The dead letters of a queue", answer=list[DeadLetter], right="queue:read:{name}")
    async def dead_letters(self, request: Request) -> Response:
        queue = await self._existing(request)
        letters: list[DeadLetter] = []
        async for letter in queue.dead_letters.letters():
            letters.append(letter)
            if len(letters) >= LETTERS_MAX:
                break
        return json_response(letters)

    async def _existing(self, request: Request) -> Queue:
        name = paths.check_name(request.path_params["name"])
        request.state.principal.demand(f"queue:read:{name}")
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
                raise Invalid(error.message, hint="docs/formats/queue-batch.md describes the bytes") from error
        raise UnsupportedEncoding(
            f"content type {kind!r} is not supported", hint=f"send application/json or {codec.CONTENT_TYPE}"
        )
