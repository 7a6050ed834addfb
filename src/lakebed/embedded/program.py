"""The programs of the stack: the bucket, the gateway and the workers. How each starts, is checked and stops."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from lakebed.core.clock import Clock
from lakebed.embedded.child import Child
from lakebed.embedded.endpoints import BucketEndpoints, child_environment
from lakebed.embedded.weed import Weed

TIMEOUT_S = 3.0
BODY_BYTES_MAX = 64 * 1024


class HealthResponse(msgspec.Struct, frozen=True):
    """Status 0 means no response; `body` is then the reason."""

    status: int
    body: str


async def probe(url: str, path: str, timeout_s: float = TIMEOUT_S) -> HealthResponse:
    """One GET, never through a proxy. Never raises."""
    return await asyncio.to_thread(_probe, url, path, timeout_s)


def _probe(url: str, path: str, timeout_s: float) -> HealthResponse:
    where = urlsplit(url)
    connection: HTTPConnection
    if where.scheme == "https":
        # Our own child, on an address that its certificate need not name; no credential is sent.
        unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        connection = HTTPSConnection(where.hostname or "", where.port, timeout=timeout_s, context=unverified)
    else:
        connection = HTTPConnection(where.hostname or "", where.port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return HealthResponse(response.status, response.read(BODY_BYTES_MAX).decode(errors="replace"))
    except (OSError, HTTPException) as error:
        return HealthResponse(0, str(error) or type(error).__name__)
    finally:
        connection.close()


READY_S = 60.0  # a gateway takes 2 s on an idle machine; the first one also verifies the store
POLL_EVERY_S = 0.1
DRAIN_S = 65.0  # longer than gateway.drain_s, so the gateway's own limit applies
BUCKET_GRACE_S = (
    20.0  # if its change log cannot be flushed: an orderly stop takes 15 s, waiting for its own subscribers
)


class Program(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def child(self) -> Child: ...

    async def start(self) -> None:
        """Starts it and returns once it is ready. Raises Unavailable with its last log lines; no process is left."""

    async def stop(self) -> None:
        """Drains and ends it. No process is left afterwards."""


class BucketProgram:
    """The embedded bucket in the stack."""

    name = "bucket"

    def __init__(self, weed: Weed) -> None:
        self._weed = weed

    @property
    def url(self) -> str:
        return self._weed.endpoints.s3

    @property
    def child(self) -> Child:
        return self._weed.child

    @property
    def endpoints(self) -> BucketEndpoints:
        return self._weed.endpoints

    async def start(self) -> None:
        await self._weed.start()

    async def stop(self) -> None:
        settled = await self._weed.settle()
        await self._weed.stop(0.0 if settled else BUCKET_GRACE_S)

    def clear(self) -> None:
        self._weed.clear()


class ServerCommand(msgspec.Struct, frozen=True):
    """The command line of a server, with `{port}` for its port and `{kafka_port}` for that of Kafka clients.

    It is ready when `health` answers 200.
    """

    name: str
    argv: tuple[str, ...]
    health: str = "/healthz"

    @property
    def ports(self) -> list[str]:
        """The names of its ports, its own first."""
        return [self.name, *(["kafka"] if "{kafka_port}" in self.argv else [])]

    def with_ports(self, ports: Mapping[str, int]) -> Sequence[str]:
        given = {"{port}": ports[self.name], "{kafka_port}": ports.get("kafka")}
        return [str(given.get(word, word)) for word in self.argv]


class ServerProgram:
    """A child that serves HTTP on a given port and reaches the bucket through its environment."""

    def __init__(
        self, command: ServerCommand, ports: Mapping[str, int], folder: Path, bucket: BucketProgram, *, clock: Clock
    ) -> None:
        self.name = command.name
        self._address = f"127.0.0.1:{ports[command.name]}"
        self.url = f"http://{self._address}"
        self.kafka = f"127.0.0.1:{ports['kafka']}" if "kafka" in command.ports else ""
        self.child = Child(command.name, folder / f"{command.name}.log", clock=clock)
        self._command, self._ports, self._folder, self._bucket, self._clock = command, ports, folder, bucket, clock

    async def start(self) -> None:
        environment = child_environment(self._folder, self._bucket.endpoints)
        self.child.start(self._command.with_ports(self._ports), env=environment)
        try:
            await self._ready()
        except BaseException:
            await self.child.stop(0.0)
            raise

    async def stop(self) -> None:
        await self.child.stop(DRAIN_S)

    async def _ready(self) -> None:
        deadline = self._clock.monotonic_s() + READY_S
        last = "no health check yet"
        while self._clock.monotonic_s() < deadline:
            if not self.child.running():
                raise self.child.ended(f"the {self.name} died while starting")
            answer = await self._probe()
            if answer.status == 200:
                return
            last = f"{answer.status}: {answer.body[:200]}" if answer.status else answer.body
            await self._clock.sleep(POLL_EVERY_S)
        raise self.child.ended(f"the {self.name} was not ready within {READY_S:.0f} s ({last})")

    async def _probe(self) -> HealthResponse:
        """Over HTTP, or over HTTPS where its settings have a certificate; `url` becomes the one that answers."""
        answer = HealthResponse(0, "")
        for scheme in ("http", "https"):
            url = f"{scheme}://{self._address}"
            answer = await probe(url, self._command.health)
            if answer.status:
                self.url = url
                break
        return answer
