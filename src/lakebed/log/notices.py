"""Notices between brokers: a partition has moved. Best effort, so that consumers at other brokers see a record at once.

A notice carries no record and proves nothing: who gets it reads the partition's control record, as it would do anyway
at its next poll. A notice that is lost costs that wait and nothing else. Notices to one broker are sent one after
another; what moves meanwhile goes into the next one.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from starlette.routing import Route

from lakebed.core.clock import Clock
from lakebed.core.context import Context
from lakebed.core.errors import Unauthenticated
from lakebed.core.http import (
    Buffer,
    DirectRequest,
    DirectResponse,
    Respond,
    body_limit,
    decode_json,
    direct,
    direct_response,
    operation,
    own_keys,
)
from lakebed.core.http_connection import HttpConnection
from lakebed.core.logs import logger
from lakebed.core.tls import client_context
from lakebed.gateway.settings import GatewaySettings
from lakebed.log.brokers import BrokerRecord, BrokerRegistry
from lakebed.log.model import TopicPartition
from lakebed.meta.protocol import Meta

PATH = "/v1/brokers/moved"
TOKEN_HEADER = "x-lakebed-broker-token"
OWNER_HEADER = "x-lakebed-broker"  # of a response: the broker that is better asked for these partitions
PENDING_MAX = 10_000  # partitions in one notice; what moves beyond that is found by polling
NOTICE_BYTES_MAX = 4 * 1024 * 1024
TIMEOUT_S = 2.0  # for one notice
PAUSE_S = 1.0  # after a notice that failed
SPACING_S = 0.002  # between two notices to a broker, for each other broker: at most 500 notices a second in all

log = logger("log")


class MovedPartition(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    high_watermark: int


class MovedNotice(msgspec.Struct, frozen=True):
    moved: list[MovedPartition]


class NoticeSender:
    """The notices to one broker. `send` raises OSError."""

    def __init__(self, send: Callable[[MovedNotice], Awaitable[None]], clock: Clock) -> None:
        self._send, self._clock = send, clock
        self._pending: dict[TopicPartition, int] = {}
        self._task: asyncio.Task[None] | None = None
        self.spacing_s = SPACING_S

    def moved(self, ends: Mapping[TopicPartition, int]) -> None:
        if len(self._pending) + len(ends) <= PENDING_MAX:
            self._pending.update(ends)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while self._pending:
            ends, self._pending = self._pending, {}
            notice = MovedNotice([MovedPartition(tp.topic, tp.partition, end) for tp, end in ends.items()])
            try:
                await self._send(notice)
            except OSError as error:
                log.debug("a notice was not delivered", error=str(error) or type(error).__name__)
                await self._clock.sleep(PAUSE_S)
                self._pending.clear()  # the other has polled meanwhile
            await self._clock.sleep(self.spacing_s)


class NoticeConnection:
    """Posts notices to one broker over one kept connection. A broker with TLS is verified before it gets its token."""

    def __init__(self, broker: BrokerRecord, tls_ca: Path | None = None) -> None:
        self._url, self._tls_ca = urlsplit(broker.http), tls_ca
        self._head = (
            f"POST {PATH} HTTP/1.1\r\nhost: {self._url.netloc}\r\n{TOKEN_HEADER}: {broker.token}\r\n"
            "content-type: application/json\r\ncontent-length: "
        ).encode()
        self._kept: HttpConnection | None = None

    async def post(self, notice: MovedNotice) -> None:
        """Raises OSError; the next notice gets a new connection then, as where the other has closed an idle one."""
        body = msgspec.json.encode(notice)
        try:
            if self._kept is None or self._kept.is_closed:
                self._kept = await self._open()
            response = await self._kept.send(self._head + b"%d\r\n\r\n" % len(body), body, TIMEOUT_S)
            if response.status != 200:
                raise OSError(f"the other broker answered {response.status}")
            if not self._kept.keeps:
                self.close()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    async def _open(self) -> HttpConnection:
        tls = client_context(self._tls_ca) if self._url.scheme == "https" else None
        port = self._url.port or (443 if tls else 80)
        return await HttpConnection.open(self._url.hostname or "", port, timeout_s=TIMEOUT_S, tls=tls)


class BrokerPeers:
    """This broker among the others: it registers, notifies them of its appends, and gets their notices.

    `heard` gets the partitions of a notice with their high watermarks.
    """

    def __init__(
        self, context: Context, meta: Meta, me: BrokerRecord, heard: Callable[[TopicPartition, int], None]
    ) -> None:
        self.registry = BrokerRegistry(context, meta, me)
        self._clock, self._heard = context.clock, heard
        self._tls_ca = context.settings.of(GatewaySettings).tls_ca
        self._senders: dict[BrokerRecord, tuple[NoticeSender, NoticeConnection]] = {}
        self._sent = context.metrics.counter("lakebed_log_notices_total").labels(direction="out")
        self._got = context.metrics.counter("lakebed_log_notices_total").labels(direction="in")
        self.routes: Sequence[Route] = [Route(PATH, direct(self._receive, self._receive_promptly), methods=["POST"])]

    def start(self) -> None:
        self.registry.start()

    async def stop(self) -> None:
        for sender, connection in self._senders.values():
            sender.close()
            connection.close()
        await self.registry.close()

    def moved(self, ends: Mapping[TopicPartition, int]) -> None:
        """Notifies every other broker, soon. Returns at once."""
        others = self.registry.others
        for broker in others:
            sender = self._sender(broker)
            sender.spacing_s = SPACING_S * len(others)
            sender.moved(ends)
        if len(self._senders) > len(others):
            self._forget(others)

    def better(self, tps: Iterable[TopicPartition], *, writes: bool) -> str:
        """The HTTP address of another broker that owns all these partitions; "" where there is none."""
        owners = {self.registry.owner(tp, writes=writes) for tp in tps}
        (owner,) = owners if len(owners) == 1 else (None,)
        return owner.http if owner is not None and owner.id != self.registry.me.id else ""

    def _sender(self, broker: BrokerRecord) -> NoticeSender:
        if broker not in self._senders:
            connection = NoticeConnection(broker, self._tls_ca)

            async def send(notice: MovedNotice) -> None:
                self._sent.inc()
                await connection.post(notice)

            self._senders[broker] = (NoticeSender(send, self._clock), connection)
        return self._senders[broker][0]

    def _forget(self, others: Sequence[BrokerRecord]) -> None:
        for broker in [broker for broker in self._senders if broker not in others]:
            sender, connection = self._senders.pop(broker)
            sender.close()
            connection.close()

    @own_keys
    @body_limit(NOTICE_BYTES_MAX)
    @operation("Notify a broker that partitions have moved", body=MovedNotice)
    async def _receive(self, call: DirectRequest) -> DirectResponse:
        """For brokers of the same lake, which know the token from the registry. Consumers that wait look again."""
        return self._received(call, await call.body())

    def _receive_promptly(self, call: DirectRequest, body: Buffer, respond: Respond) -> None:
        respond(lambda: self._received(call, body))

    def _received(self, call: DirectRequest, body: Buffer) -> DirectResponse:
        token = call.header(TOKEN_HEADER.encode())
        if not hmac.compare_digest(token.encode(), self.registry.me.token.encode()):
            raise Unauthenticated(
                "this is not the token of this broker", hint="only brokers of the same lake send notices"
            )
        self._got.inc()
        for moved in decode_json(body, MovedNotice).moved:
            self._heard(TopicPartition(moved.topic, moved.partition), moved.high_watermark)
        return direct_response({})
