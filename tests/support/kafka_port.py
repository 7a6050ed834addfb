"""The port for Kafka clients without a socket: a client's bytes go into the server's stream, on a manual clock."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from lakebed.core.clock import settle
from lakebed.core.context import Context
from lakebed.core.quotas import KeyQuotas
from lakebed.gateway.auth import Keyring
from lakebed.gateway.middleware import RefusalLog
from lakebed.gateway.state import PortAccess
from lakebed.log.broker import Broker
from lakebed.log.kafka.server import KafkaServer
from lakebed.log.kafka.service import KafkaServices
from lakebed.log.kafka.stream import FrameStream
from support.kafka_client import KafkaClient
from support.log_host import Host


class Transport:
    """A client's connection without a socket: counts how often reading was paused and resumed."""

    def __init__(self) -> None:
        self.pauses = self.resumes = 0
        self.written = b""
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.pauses += 1

    def resume_reading(self) -> None:
        self.resumes += 1

    def write(self, data: bytes) -> None:
        self.written += data


def feed(stream: FrameStream, data: bytes) -> int:
    """As the event loop does, once: gives how much it received."""
    buffer = stream.get_buffer(-1)
    some = data[: len(buffer)]
    buffer[: len(some)] = some
    stream.buffer_updated(len(some))
    return len(some)


def services_of(host: Host, context: Context) -> KafkaServices:
    clock = host.clock
    access = PortAccess(
        Keyring((), clock),
        KeyQuotas(clock),
        context.metrics.counter("lakebed_http_throttled_total"),
        RefusalLog(clock),
        None,
    )
    return KafkaServices(context, Broker(context, host.meta()), access)


class _Wire(Transport):
    """Both ends: the server's transport, which fills the client's reader, and the writer of the client."""

    def __init__(self, serve: Any) -> None:
        super().__init__()
        self.stream, self.reader = FrameStream(serve), asyncio.StreamReader()
        self.stream.connection_made(self)  # type: ignore[arg-type]
        self.sender = self.Sender(self.stream)

    class Sender:
        def __init__(self, stream: FrameStream) -> None:
            self._stream = stream

        def write(self, data: bytes) -> None:
            """A request of a few kilobytes at most: it fits into the buffer of the stream."""
            assert len(data) == feed(self._stream, data)

        def close(self) -> None:
            self._stream.connection_lost(None)

    def write(self, data: bytes) -> None:
        self.reader.feed_data(data)


class KafkaPort:
    """One broker's port, registered under an address of its own: `async with KafkaPort(host, "a:9092") as port`."""

    def __init__(self, host: Host, address: str = "a:9092", **settings: Any) -> None:
        self._address = address
        self.services = services_of(host, host.context(**settings))
        self._server, self._wires = KafkaServer(self.services), list[_Wire]()

    @property
    def id(self) -> int:
        return self.services.registry.me.kafka_id

    def client(self) -> KafkaClient:
        wire = _Wire(self._server._serve)
        self._wires.append(wire)
        return KafkaClient(wire.reader, wire.sender)  # type: ignore[arg-type]

    async def __aenter__(self) -> KafkaPort:
        name, _, number = self._address.rpartition(":")
        await self.services.registry.serve_kafka(name, int(number))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for wire in self._wires:
            wire.stream.connection_lost(None)
        await settle(50)
        await self._server.stop()
