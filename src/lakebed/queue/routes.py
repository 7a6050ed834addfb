"""The queue over HTTP.

POST /v1/queues/{name}/entries        enqueue; answers when the entries are durable
GET  /v1/queues                       every queue and how it stands
GET  /v1/queues/{name}                one queue
GET  /v1/queues/{name}/dead-letters   its dead letters
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed.context import Context, Health
from lakebed.errors import Corrupt, Invalid, NotFound, TooLarge, UnsupportedEncoding
from lakebed.queue import codec, paths
from lakebed.queue.broker import Broker
from lakebed.queue.model import DeadLetter, KeyValueEntry, QueueStatus
from lakebed.queue.queue import Queue, names
from lakebed.queue.settings import QueueSettings
from lakebed.wire import check_items, decode_json, json_answer, operation

LETTERS_MAX = 1000  # dead letters in one answer


class Accepted(msgspec.Struct, frozen=True):
    """The answer to entries that are durable."""

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
        self._broker = Broker(context)

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

    @operation("Enqueue entries; answers when they are durable", body=list[KeyValueEntry], answer=Accepted)
    async def put(self, request: Request) -> Response:
        name = paths.check_name(request.path_params["name"])
        request.state.principal.demand(f"queue:write:{name}")
        entries = self._entries(request.headers.get("content-type", "application/json"), await request.body())
        durable = await self._broker.put(name, entries)
        return json_answer(Accepted(name, durable.location, durable.sequence, len(entries)))

    @operation("Every queue", answer=list[QueueStatus])
    async def all(self, request: Request) -> Response:
        request.state.principal.demand("queue:read")
        found = await names(self._store, self._settings)
        return json_answer([await self._broker.queue(name).status() for name in found])

    @operation("One queue", answer=QueueStatus)
    async def one(self, request: Request) -> Response:
        return json_answer(await (await self._asked(request)).status())

    @operation("The dead letters of a queue", answer=list[DeadLetter])
    async def dead_letters(self, request: Request) -> Response:
        queue = await self._asked(request)
        letters: list[DeadLetter] = []
        async for letter in queue.dead_letters.letters():
            letters.append(letter)
            if len(letters) >= LETTERS_MAX:
                break
        return json_answer(letters)

    async def _asked(self, request: Request) -> Queue:
        name = paths.check_name(request.path_params["name"])
        request.state.principal.demand(f"queue:read:{name}")
        queue = self._broker.queue(name)
        if not await queue.exists():
            raise NotFound(f"there is no queue {name}", hint="a queue is there once something was put into it")
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
                    raise TooLarge(error.message, hint="send less at once") from error
                raise Invalid(error.message, hint="docs/formats/queue-batch.md describes the bytes") from error
        raise UnsupportedEncoding(
            f"content type {kind!r} is not spoken here", hint=f"application/json or {codec.CONTENT_TYPE}"
        )
