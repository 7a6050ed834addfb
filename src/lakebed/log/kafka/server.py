"""The server of Kafka's protocol: connections, frames, limits, authentication. Thin: a handler makes each answer.

Requests of a connection are answered in their order, as the protocol demands. A Produce is appended when it is read, so
many of one connection share a blob; other requests of a connection run one after another. Memory is bounded: a frame
has a limit, all frames together have one, and a client that takes its answers too slowly is disconnected.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from kio.schema.errors import ErrorCode

from lakebed.core.auth import ANYBODY, Principal
from lakebed.core.errors import Invalid, LakebedError, Unauthenticated, Unavailable
from lakebed.core.logs import logger
from lakebed.log.kafka import wire
from lakebed.log.kafka.data import DataRequests
from lakebed.log.kafka.group_requests import GroupRequests
from lakebed.log.kafka.service import KafkaServices, RequestInfo
from lakebed.log.kafka.topic_requests import TopicRequests
from lakebed.log.kafka.wire import API_VERSIONS, APIS, UnservedRequest, WireRequest

FRAME_BYTES_MAX = 64 * 1024 * 1024  # one request
STRANGER_BYTES_MAX = 64 * 1024  # one request of a client that has not authenticated yet
FLIGHT_BYTES_MAX = 192 * 1024 * 1024  # all requests and answers in memory: beyond it, no more is read
WAITING_MAX = 32  # requests of one connection without an answer
CONNECTIONS_MAX = 4096
FRAME_S = 60.0  # for a whole frame, once it has begun
ANSWER_S = 60.0  # for a client to take an answer
IDLE_S = 600.0
DRAIN_S = 2.0
LENGTH = struct.Struct(">i")
WITHOUT_KEY = frozenset({"api_versions", "sasl_handshake", "sasl_authenticate"})
MECHANISM = "PLAIN"

Answer = Mapping[str, Any]
Handler = Callable[[Any, RequestInfo], Awaitable[Answer]]

log = logger("log")


class FlightBytes:
    """A budget of bytes. Who would exceed it waits; one frame alone always fits."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0
        self._freed = asyncio.Condition()

    async def take(self, size: int) -> None:
        async with self._freed:
            await self._freed.wait_for(lambda: not self._held or self._held + size <= self._most)
            self._held += size

    async def free(self, size: int) -> None:
        async with self._freed:
            self._held -= size
            self._freed.notify_all()


class KafkaServer:
    """Listens from `start` to `stop`. With `tls` connections are encrypted."""

    def __init__(self, services: KafkaServices, *, tls: ssl.SSLContext | None = None) -> None:
        self._services, self._tls = services, tls
        self.flight = FlightBytes(FLIGHT_BYTES_MAX)
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], KafkaConnection] = {}
        data, topics, groups = DataRequests(services), TopicRequests(services), GroupRequests(services)
        self.produce = data.produce
        self.handlers: dict[str, Handler] = {
            api.name: getattr(owner, api.name)
            for api in APIS
            for owner in (data, topics, groups)
            if api.name != "produce" and hasattr(owner, api.name)
        }
        metrics = services.context.metrics
        self.requests = metrics.counter("lakebed_log_kafka_requests_total")
        metrics.gauge("lakebed_log_kafka_connections").set_function(lambda: len(self._connections))

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self, host: str, port: int, advertised: str = "") -> None:
        """Raises Unavailable when the port is taken. Clients use `advertised`, HOST or HOST:PORT, or `host`."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, ssl=self._tls, limit=1 << 20)
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another log.kafka_port"
            ) from error
        await self._services.registry.start(*_address(advertised, host, self.port))
        log.info("serving Kafka clients", host=host, port=self.port)

    async def stop(self) -> None:
        """Takes no more requests, and answers those that it has, within `DRAIN_S`."""
        await self._services.registry.stop()
        if self._server is not None:
            self._server.close()
        tasks = list(self._connections)
        for connection in self._connections.values():
            connection.drain()
        if tasks:
            _, waiting = await asyncio.wait(tasks, timeout=DRAIN_S)  # a long poll, or a client that takes no answers
            for task in waiting:
                task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= CONNECTIONS_MAX:
            writer.close()
            return
        connection = self._connections[task] = KafkaConnection(self, self._services, reader, writer)
        try:
            await connection.run()
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass
        except Invalid as error:
            log.info("Kafka client disconnected", error=error.message)
        except Exception:
            log.exception("Kafka connection failed")
        finally:
            del self._connections[task]
            writer.close()
            with suppress(OSError, asyncio.CancelledError, TimeoutError):
                await writer.wait_closed()


class KafkaConnection:
    """One client. `principal` is None until it has authenticated, where keys are configured."""

    def __init__(
        self, server: KafkaServer, services: KafkaServices, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._server, self._services, self._reader, self._writer = server, services, reader, writer
        self._principal: Principal | None = None if len(services.keyring) else ANYBODY
        self._host = str((writer.get_extra_info("peername") or ("",))[0])
        self._answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(WAITING_MAX)
        self._last: asyncio.Task[bytes] | None = None  # of the requests that run one after another
        self._reading: asyncio.Task[None] | None = None
        self._held = 0  # bytes of this client's requests; what is left of them is freed when it is gone

    async def run(self) -> None:
        writing = asyncio.create_task(self._write())
        reading = self._reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait([writing, reading], return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and not writing.done():
                async with asyncio.timeout(ANSWER_S):
                    await self._answers.put(None)
                    await writing
            for task in (reading, writing):
                if task.done():
                    task.result()
        finally:
            reading.cancel()
            writing.cancel()
            while not self._answers.empty():
                left = self._answers.get_nowait()
                if left is not None:
                    left.cancel()
            held, self._held = self._held, 0
            await self._server.flight.free(held)

    def drain(self) -> None:
        """Reads no more requests; the connection ends when those that were read are answered."""
        if self._reading is not None:
            self._reading.cancel()

    async def _answered(self, size: int) -> None:
        """The request of so many bytes is no longer in memory."""
        if self._held:
            self._held -= size
            await self._server.flight.free(size)

    async def _read(self) -> None:
        while True:
            async with asyncio.timeout(IDLE_S):
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            limit = FRAME_BYTES_MAX if self._principal is not None else STRANGER_BYTES_MAX
            if not 0 < length <= limit:
                raise Invalid(f"a Kafka frame of {length} bytes; {limit} is the limit")
            await self._server.flight.take(length)
            self._held += length
            async with asyncio.timeout(FRAME_S):
                frame = await self._reader.readexactly(length)
            await self._answers.put(self._begin(frame))

    def _begin(self, frame: bytes) -> asyncio.Task[bytes]:
        """Starts the request. A Produce is appended now; others wait for the one before."""
        try:
            request = wire.read_request(frame)
        except UnservedRequest as unserved:
            if unserved.key != API_VERSIONS:
                raise
            answer = {"error_code": ErrorCode.unsupported_version, "api_keys": _ranges()}
            made = wire.response_bytes(API_VERSIONS, 0, unserved.correlation_id, answer)
            return asyncio.create_task(self._made(made, len(frame)))
        name = request.api.name
        if self._principal is None and name not in WITHOUT_KEY:
            raise Invalid(f"{name} before authentication", hint="use SASL PLAIN with a gateway key's name and secret")
        self._server.requests.labels(api=name).inc()
        if name == "produce":
            answer_later = self._server.produce(request.body, self._info(request))
            return asyncio.create_task(self._produced(request, answer_later, len(frame)))
        self._last = asyncio.create_task(self._handle(request, self._last, len(frame)))
        return self._last

    def _info(self, request: WireRequest) -> RequestInfo:
        assert self._principal is not None
        return RequestInfo(request.version, request.client_id, self._host, self._principal)

    async def _made(self, data: bytes, held: int) -> bytes:
        await self._answered(held)
        return data

    async def _produced(self, request: WireRequest, later: asyncio.Future[Answer], held: int) -> bytes:
        try:
            answer = await later
        finally:
            await self._answered(held)
        return b"" if request.body.acks == 0 else _response(request, answer)

    async def _handle(self, request: WireRequest, before: asyncio.Task[bytes] | None, held: int) -> bytes:
        try:
            if before is not None:
                await asyncio.wait([before])
            if request.api.name in WITHOUT_KEY:
                return _response(request, self._session_answer(request))
            return _response(request, await self._server.handlers[request.api.name](request.body, self._info(request)))
        finally:
            await self._answered(held)

    async def _write(self) -> None:
        while (answer := await self._answers.get()) is not None:
            data = await answer
            if data:
                await self._server.flight.take(len(data))
                try:
                    self._writer.write(data)
                    async with asyncio.timeout(ANSWER_S):
                        await self._writer.drain()
                finally:
                    await self._server.flight.free(len(data))

    def _session_answer(self, request: WireRequest) -> Answer:
        if request.api.name == "api_versions":
            return {"error_code": ErrorCode.none, "api_keys": _ranges(), "finalized_features_epoch": -1}
        if request.api.name == "sasl_handshake":
            known = request.body.mechanism == MECHANISM
            code = ErrorCode.none if known else ErrorCode.unsupported_sasl_mechanism
            return {"error_code": code, "mechanisms": (MECHANISM,)}
        try:
            self._principal = self._authenticated(bytes(request.body.auth_bytes))
        except LakebedError as error:
            return {"error_code": ErrorCode.sasl_authentication_failed, "error_message": error.message}
        return {"error_code": ErrorCode.none, "error_message": None, "auth_bytes": b""}

    def _authenticated(self, sent: bytes) -> Principal:
        """PLAIN: an identity nobody uses, a key's name and its secret, with zero bytes between them."""
        if not len(self._services.keyring):
            return ANYBODY
        _, name, secret = [*sent.split(b"\0"), b"", b""][:3]
        found = self._services.keyring.of_secret(secret)
        if found is None or found.name.encode() != name:
            raise Unauthenticated("the name or the secret is wrong", hint="use a key's name and its secret")
        return found


def _address(advertised: str, host: str, port: int) -> tuple[str, int]:
    """Where clients connect: HOST:PORT or HOST as it is advertised, or else where this server listens."""
    name, _, number = advertised.rpartition(":")
    if name and number.isdecimal() and (":" not in name or name.startswith("[")):
        return name.strip("[]"), int(number)
    everywhere = host in ("", "0.0.0.0", "::")
    return advertised.strip("[]") or (socket.getfqdn() if everywhere else host), port


def _ranges() -> list[Answer]:
    return [{"api_key": api.key, "min_version": api.least, "max_version": api.most} for api in APIS]


def _response(request: WireRequest, answer: Answer) -> bytes:
    return wire.response_bytes(request.api.key, request.version, request.correlation_id, answer)
