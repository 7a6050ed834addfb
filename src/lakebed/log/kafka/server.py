"""The server of Kafka's protocol: connections, frames, limits, authentication. Thin: a handler makes each answer.

A connection authenticates once: by a client certificate, or by SASL PLAIN with a key's name and secret. Each request is
admitted with what the key is at that moment, so a key that is revoked, rotated or expires ends its connections. A key
over its limits is delayed: no more is read from its connections until it is within them again. Answers say for how long
(`throttle_time`), so that clients wait by themselves. A Produce without an answer is an upload of its key.

Requests of a connection are answered in their order, as the protocol demands. A Produce is appended when it is read, so
many of one connection share a blob; other requests of a connection run one after another. Memory is bounded: a frame
has a limit, all frames together have one, and a client that takes its answers too slowly is disconnected.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from math import ceil
from typing import Any

from kio.schema.errors import ErrorCode

from lakebed.core.auth import ANYBODY, NOBODY, Principal
from lakebed.core.context import Context
from lakebed.core.errors import Invalid, LakebedError, Throttled, Unauthenticated, Unavailable
from lakebed.core.logs import logger
from lakebed.core.quotas import USAGE, KeyUsage
from lakebed.core.trail import CALLER, Caller
from lakebed.gateway.keys import KeyRecord
from lakebed.gateway.listen import check_port
from lakebed.gateway.settings import GatewaySettings
from lakebed.gateway.state import PortAccess
from lakebed.gateway.tls import certificate_names
from lakebed.log.broker import Broker
from lakebed.log.kafka import wire
from lakebed.log.kafka.data import DataRequests
from lakebed.log.kafka.group_requests import GroupRequests
from lakebed.log.kafka.service import KafkaServices, RequestInfo
from lakebed.log.kafka.stream import FrameStream
from lakebed.log.kafka.topic_requests import TopicRequests
from lakebed.log.kafka.wire import API_VERSIONS, APIS, UnservedRequest, WireRequest
from lakebed.log.kafka_compression import Buffer

FRAME_BYTES_MAX = 64 * 1024 * 1024  # one request
STRANGER_BYTES_MAX = 64 * 1024  # one request of a client that has not authenticated yet
FLIGHT_BYTES_MAX = 192 * 1024 * 1024  # all requests and answers in memory: beyond it, no more is read
WAITING_MAX = 32  # requests of one connection without an answer
CONNECTIONS_MAX = 4096
FRAME_S = 60.0  # for a whole frame, once it has begun
ANSWER_S = 60.0  # for a client to take an answer
IDLE_S = 600.0
STRANGER_S = 30.0  # for a client to authenticate: strangers must not hold connections that others need
HANDSHAKE_S = 10.0  # for a TLS handshake
DRAIN_S = 2.0
THROTTLE_S_MAX = 30.0  # that a client is told to wait: longer than any of them should be silent
LENGTH, KIND = struct.Struct(">i"), struct.Struct(">h")
WITHOUT_KEY = frozenset({"api_versions", "sasl_handshake", "sasl_authenticate"})
MECHANISM = "PLAIN"
PRODUCE = KIND.pack(next(api.key for api in APIS if api.name == "produce"))

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
    """Listens from `start` to `stop`, with the keys, the limits and the certificate of its gateway."""

    def __init__(self, services: KafkaServices) -> None:
        self._services = services
        self.flight = FlightBytes(FLIGHT_BYTES_MAX)
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], KafkaConnection] = {}
        data, topics, groups = DataRequests(services), TopicRequests(services), GroupRequests(services)
        self.produce, self.over_quota = data.produce, data.over_quota
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
        check_port(port)
        try:
            tls = self._services.access.tls
            secure: dict[str, Any] = {"ssl": tls.context, "ssl_handshake_timeout": HANDSHAKE_S} if tls else {}
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(lambda: FrameStream(self._serve), host, port, **secure)
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another log.kafka_port"
            ) from error
        await self._services.registry.serve_kafka(*_address(advertised, host, self.port))
        log.info("serving Kafka clients", host=host, port=self.port, tls=tls is not None)

    async def stop(self) -> None:
        """Takes no more requests, and answers those that it has, within `DRAIN_S`."""
        await self._services.registry.close()
        if self._server is not None:
            self._server.close()
        tasks = list(self._connections)
        for connection in self._connections.values():
            connection.drain()
        if tasks:
            _, waiting = await asyncio.wait(tasks, timeout=DRAIN_S)  # a long poll, or a client that takes no answers
            for task in waiting:
                task.cancel()

    async def _serve(self, stream: FrameStream) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= CONNECTIONS_MAX:
            stream.close()
            return
        connection = self._connections[task] = KafkaConnection(self, self._services, stream)
        try:
            await connection.run()
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass
        except (Invalid, Unauthenticated) as error:
            self._services.access.refusals.note(connection.name, connection.host, kafka=error.message)
        except Exception:
            log.exception("Kafka connection failed")
        finally:
            del self._connections[task]
            stream.close()
            with suppress(OSError, asyncio.CancelledError, TimeoutError):
                await stream.wait_closed()


class KafkaConnection:
    """One client. Where keys are configured it has none of its own until it has authenticated."""

    def __init__(self, server: KafkaServer, services: KafkaServices, stream: FrameStream) -> None:
        self._server, self._services, self._stream = server, services, stream
        self._keyring, self._began_s = services.access.keyring, asyncio.get_running_loop().time()
        self.host = str((stream.get_extra_info("peername") or ("",))[0])
        self.name, self._fingerprint = NOBODY.name, ""  # of the key that it authenticated with
        if (key := self._keyring.key_certified(certificate_names(stream))) is not None:
            self._authenticate(key)
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
            length = await self._next_length()
            principal = self._principal()
            limit = FRAME_BYTES_MAX if principal is not None else STRANGER_BYTES_MAX
            if not 0 < length <= limit:
                raise Invalid(f"a Kafka frame of {length} bytes; {limit} is the limit")
            async with asyncio.timeout(FRAME_S):
                kind = await self._stream.peek(min(length, KIND.size))
            usage = await self._admit(principal, length, upload=kind == PRODUCE) if principal is not None else None
            with ExitStack() as unanswered:
                if usage is not None and kind == PRODUCE:
                    unanswered.callback(usage.end, upload=True, size=0)
                await self._server.flight.take(length)
                self._held += length
                async with asyncio.timeout(FRAME_S):
                    frame = await self._stream.readexactly(length)
                task = await self._begin(frame)
                task.add_done_callback(partial(_closed, unanswered.pop_all()))
            await self._answers.put(task)

    async def _next_length(self) -> int:
        """The length of the next request. Raises TimeoutError for a client that is idle, or still unknown, too long."""
        now_s = asyncio.get_running_loop().time
        while True:
            known = self._principal() is not None
            try:
                async with asyncio.timeout_at(now_s() + IDLE_S if known else self._began_s + STRANGER_S):
                    return int(LENGTH.unpack(await self._stream.readexactly(LENGTH.size))[0])
            except TimeoutError:
                if known or self._principal() is None:  # or else it has authenticated since
                    raise

    def _principal(self) -> Principal | None:
        """Who this client is now; None before it has authenticated. Raises Unauthenticated when its key has ended."""
        if not self._keyring.required:
            return ANYBODY
        if not self._fingerprint:
            return None
        found = self._keyring.current(self.name, self._fingerprint)
        if found is None:
            raise Unauthenticated("the key was revoked, rotated or has expired", hint="authenticate with another key")
        return found

    def _authenticate(self, key: KeyRecord) -> None:
        self.name, self._fingerprint = key.name, key.fingerprint

    async def _admit(self, principal: Principal, length: int, *, upload: bool) -> KeyUsage | None:
        """Counts a request against its key, before its bytes are in memory; waits while the key is over a limit.

        None for a key without limits. An upload ends with its answer: `end` is the caller's to call.
        """
        CALLER.set(Caller(self.host, principal.tenant))
        usage = self._services.access.quotas.of(principal)
        USAGE.set(usage)
        while usage is not None:
            try:
                usage.begin(upload=upload)
            except Throttled as over:
                self._services.access.throttled.inc()
                await usage.wait(over)
            else:
                usage.end(upload=False, size=length)
                break
        return usage

    async def _begin(self, frame: Buffer) -> asyncio.Task[bytes]:
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
        self._server.requests.labels(api=name).inc()
        if name in WITHOUT_KEY:
            self._last = asyncio.create_task(self._handle(request, None, self._last, len(frame)))
            return self._last
        principal = self._principal()
        if principal is None:
            raise Unauthenticated(f"{name} before authentication", hint="use SASL PLAIN with a key's name and secret")
        info = RequestInfo(request.version, request.client_id, self.host, principal)
        if name == "produce":
            over = await self._server.over_quota(request.body, info)
            answer_later = self._server.produce(request.body, info, over)
            return asyncio.create_task(self._produced(request, answer_later, len(frame)))
        self._last = asyncio.create_task(self._handle(request, info, self._last, len(frame)))
        return self._last

    async def _made(self, data: bytes, held: int) -> bytes:
        await self._answered(held)
        return data

    async def _produced(self, request: WireRequest, later: asyncio.Future[Answer], held: int) -> bytes:
        try:
            answer = await later
        finally:
            await self._answered(held)
        return b"" if request.body.acks == 0 else _response(request, answer)

    async def _handle(
        self, request: WireRequest, info: RequestInfo | None, before: asyncio.Task[bytes] | None, held: int
    ) -> bytes:
        try:
            if before is not None:
                await asyncio.wait([before])
            if info is None:
                return _response(request, self._session_answer(request))
            return _response(request, await self._server.handlers[request.api.name](request.body, info))
        finally:
            await self._answered(held)

    async def _write(self) -> None:
        while (answer := await self._answers.get()) is not None:
            data = await answer
            if data:
                await self._server.flight.take(len(data))
                try:
                    self._stream.write(data)
                    async with asyncio.timeout(ANSWER_S):
                        await self._stream.drain()
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
            self._sign_in(bytes(request.body.auth_bytes))
        except LakebedError as error:
            self._services.access.refusals.note(NOBODY.name, self.host, kafka=error.message)
            return {"error_code": ErrorCode.sasl_authentication_failed, "error_message": error.message}
        return {"error_code": ErrorCode.none, "error_message": None, "auth_bytes": b""}

    def _sign_in(self, sent: bytes) -> None:
        """PLAIN: an identity nobody uses, a key's name and its secret, with zero bytes between them."""
        if not self._keyring.required:
            return
        _, name, secret = [*sent.split(b"\0"), b"", b""][:3]
        found = self._keyring.key_with(secret)
        if found is None or found.name.encode() != name:
            raise Unauthenticated("the name or the secret is wrong", hint="use a key's name and its secret")
        self._authenticate(found)


async def serve_kafka(context: Context, broker: Broker, access: PortAccess) -> KafkaServer:
    """A server on the gateway's host and `log.kafka_port`."""
    made = KafkaServer(KafkaServices(context, broker, access))
    settings, host = broker.settings, context.settings.of(GatewaySettings).host
    assert settings.kafka_port is not None
    await made.start(host, settings.kafka_port, settings.kafka_advertised)
    return made


def _address(advertised: str, host: str, port: int) -> tuple[str, int]:
    """Where clients connect: HOST:PORT or HOST as it is advertised, or else where this server listens."""
    name, _, number = advertised.rpartition(":")
    if name and number.isdecimal() and (":" not in name or name.startswith("[")):
        return name.strip("[]"), int(number)
    everywhere = host in ("", "0.0.0.0", "::")
    return advertised.strip("[]") or (socket.getfqdn() if everywhere else host), port


def _closed(opened: ExitStack, _: asyncio.Task[bytes]) -> None:
    opened.close()


def _ranges() -> list[Answer]:
    return [{"api_key": api.key, "min_version": api.least, "max_version": api.most} for api in APIS]


def _response(request: WireRequest, answer: Answer) -> bytes:
    usage = USAGE.get()
    if usage is not None and (wait_s := usage.wait_s()):
        answer = {**answer, "throttle_time": timedelta(milliseconds=ceil(min(wait_s, THROTTLE_S_MAX) * 1000))}
    return wire.response_bytes(request.api.key, request.version, request.correlation_id, answer)
