"""A client of the filer's gRPC interface: several endpoints, the last that answered first, a timeout on everything.

NotFound, Stale and Corrupt are answers. Unavailable means that no endpoint gave one: ask again later. A change whose
answer was lost raises OutcomeUnknown; conditional ones may simply be asked again, the condition then tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from lakebed.clock import Clock
from lakebed.errors import Corrupt, Invalid, LakebedError, NotFound, OutcomeUnknown, Stale, Unavailable
from lakebed.filer import requests, wire
from lakebed.filer.model import Entry, Event, Transaction
from lakebed.filer.settings import FilerSettings
from lakebed.ids import Ids

SERVICE = "/filer_pb.SeaweedFiler/"
PAGE = 1024  # entries asked for at once
TIMEOUT_S = 10.0
UNHEALTHY_S = 60.0
IDLE_S = 30.0  # silence of a stream, heartbeats included, after which it is given up
ABSENT = "no entry is found"  # what the filer says, as an unknown error, of an entry that is not there
PRECONDITION_FAILED = 6

T = TypeVar("T")

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", wire.MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Each client has its own connections: its end must not end another's.
    ("grpc.use_local_subchannel_pool", 1),
)


class FilerClient:
    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        clock: Clock,
        ids: Ids,
        timeout_s: float = TIMEOUT_S,
        unhealthy_s: float = UNHEALTHY_S,
        idle_s: float = IDLE_S,
    ) -> None:
        if not endpoints:
            raise Invalid("no filer is named", hint="set filer.grpc to host:port of a filer's gRPC port")
        self._clock, self._ids = clock, ids
        self._timeout_s, self._unhealthy_s, self._idle_s = timeout_s, unhealthy_s, idle_s
        self._endpoints = list(dict.fromkeys(endpoints))
        self._failed_until_s: dict[str, float] = {}
        self._channels: dict[str, Any] = {}

    @classmethod
    def of(cls, settings: FilerSettings, *, clock: Clock, ids: Ids) -> Self:
        """Raises Invalid when the settings name no filer."""
        return cls(
            settings.endpoints,
            clock=clock,
            ids=ids,
            timeout_s=settings.timeout_s,
            unhealthy_s=settings.unhealthy_s,
        )

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    async def __aenter__(self) -> FilerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Reading.

    async def lookup(self, directory: str, name: str) -> Entry:
        """The entry as it is now. Raises NotFound."""
        request = requests.lookup(directory, name)
        answer = await self._ask("LookupDirectoryEntry", request, f"{directory}/{name}")
        entry = wire.read_lookup(answer)
        if entry is None:
            raise NotFound(f"{directory}/{name} does not exist")
        return entry

    async def page(
        self, directory: str, *, prefix: str = "", after: str = "", inclusive: bool = False, limit: int = PAGE
    ) -> list[Entry]:
        """One page of a folder by name, strictly behind `after` unless inclusive; empty when nothing follows."""
        request = requests.list(directory, prefix=prefix, after=after, inclusive=inclusive, limit=limit)

        async def ask(endpoint: str) -> list[Entry]:
            call = self._stream(endpoint, "ListEntries", request, self._timeout_s)
            return [entry async for message in call if (entry := wire.read_lookup(message)) is not None]

        try:
            return await self._try(ask, directory)
        except NotFound:
            return []

    async def entries(
        self, directory: str, *, prefix: str = "", after: str = "", inclusive: bool = False, limit: int = PAGE
    ) -> AsyncGenerator[Entry, None]:
        """Every entry of a folder, page by page. Not a snapshot: what appears meanwhile may be told or not."""
        while True:
            found = await self.page(directory, prefix=prefix, after=after, inclusive=inclusive, limit=limit)
            for entry in found:
                yield entry
            if len(found) < limit:
                return
            after, inclusive = found[-1].name, False

    async def subscribe(
        self, prefixes: Sequence[str], *, since_ns: int, until_ns: int = 0, tick_s: float = 0.0
    ) -> AsyncGenerator[Event, None]:
        """Changes under the prefixes strictly after `since_ns`, in the order of the log; heartbeats come through.

        With `until_ns` it ends behind the last change not later than that, on a quiet cluster too; without, it goes
        on until the caller stops. With `tick_s` a heartbeat is given whenever nothing came for so long. Raises
        Unavailable when the stream breaks: go on from the last change seen, which may be with another filer.
        """
        endpoint = self._in_order()[0]
        request = requests.subscribe(
            f"lakebed-{self._ids.token()}",
            prefixes,
            since_ns=since_ns,
            until_ns=until_ns,
            client_id=1 + int(self._ids.token()[:7], 16),
            heartbeats=True,
        )
        try:
            messages = self._messages(endpoint, request, tick_s)
            async with aclosing(messages):
                async for message in messages:
                    for event in wire.read_events(message):
                        if until_ns and event.ts_ns > until_ns:
                            return
                        # What is in the server's memory is told again from `since_ns` on, what is on disk is not.
                        if event.heartbeat or event.ts_ns > since_ns:
                            yield event
        except grpc.aio.AioRpcError as error:
            self._failed(endpoint)
            raise _meaning(error, endpoint, ", ".join(prefixes)) from error

    async def _messages(self, endpoint: str, request: bytes, tick_s: float) -> AsyncGenerator[bytes, None]:
        """What the stream says; with `tick_s`, empty bytes, which are a heartbeat, when it said nothing for so long."""
        call = self._stream(endpoint, "SubscribeMetadata", request, None)
        reading: asyncio.Future[Any] | None = None
        heard_s = self._clock.monotonic_s()
        try:
            while self._clock.monotonic_s() - heard_s < self._idle_s:
                if tick_s:
                    # A read that is given up ends the stream, so it is kept and waited for again.
                    reading = reading or asyncio.ensure_future(call.read())
                    if not (await asyncio.wait([reading], timeout=tick_s))[0]:
                        yield b""
                        continue
                    message, reading = reading.result(), None
                else:
                    async with asyncio.timeout(self._idle_s):
                        message = await call.read()
                if message is grpc.aio.EOF:
                    return
                yield message
                heard_s = self._clock.monotonic_s()
        except TimeoutError:
            pass
        finally:
            if reading is not None:
                reading.cancel()
            call.cancel()
        self._failed(endpoint)
        raise Unavailable(f"the filer at {endpoint} said nothing for {self._idle_s:.0f} s")

    # Changing.

    async def delete(self, directory: str, name: str, *, recursive: bool = False) -> None:
        """Removes an entry and its bytes, whatever it is; nothing there is success. Not guarded."""
        request = requests.delete(directory, name, delete_data=True, recursive=recursive)
        try:
            error, _ = wire.read_outcome(await self._ask("DeleteEntry", request, f"{directory}/{name}", change=True))
        except NotFound:
            return
        if error and ABSENT not in error:
            raise Unavailable(f"{directory}/{name} could not be deleted: {error}")

    async def create(self, directory: str, name: str, *, ballast_bytes: int = 0) -> None:
        """An empty file in place of whatever was there. The ballast makes its change heavy, and is kept by nobody."""
        request = requests.create(directory, Entry(name), ballast_bytes=ballast_bytes)
        error, _ = wire.read_outcome(await self._ask("CreateEntry", request, f"{directory}/{name}", change=True))
        if error:
            raise Unavailable(f"{directory}/{name} could not be created: {error}")

    async def transact(self, transaction: Transaction) -> None:
        """All mutations or none, when the conditions hold. Raises Stale when one does not."""
        request = requests.transaction(transaction)
        answer = await self._ask("ObjectTransaction", request, transaction.path, change=True)
        error, code = wire.read_outcome(answer)
        if code == PRECONDITION_FAILED:
            raise Stale(f"{transaction.path} is not what was expected: {error}")
        if ABSENT in error:
            raise NotFound(f"{transaction.path}: {error}")
        if error or code:
            raise Unavailable(f"{transaction.path} could not be changed: {error or code}")

    # Endpoints.

    async def _ask(self, method: str, request: bytes, about: str, *, change: bool = False) -> bytes:
        async def one(endpoint: str) -> bytes:
            call = self._channel(endpoint).unary_unary(
                SERVICE + method, request_serializer=bytes, response_deserializer=bytes
            )
            answer: bytes = await call(request, timeout=self._timeout_s)
            return answer

        return await self._try(one, about, change=change)

    async def _try(self, ask: Callable[[str], Awaitable[T]], about: str, *, change: bool = False) -> T:
        last: LakebedError = Unavailable("no filer was asked")
        for endpoint in self._in_order():
            try:
                answer = await ask(endpoint)
            except grpc.aio.AioRpcError as error:
                last = _meaning(error, endpoint, about)
                if not isinstance(last, Unavailable):
                    raise last from error
                self._failed(endpoint)
                if change and error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise OutcomeUnknown(last.message) from error
            else:
                self._failed_until_s.pop(endpoint, None)
                return answer
        raise last

    def _in_order(self) -> list[str]:
        """Healthy endpoints first, in the order given; then the others, longest failed first."""
        now_s = self._clock.monotonic_s()
        return sorted(self._endpoints, key=lambda one: max(0.0, self._failed_until_s.get(one, 0.0) - now_s))

    def _failed(self, endpoint: str) -> None:
        self._failed_until_s[endpoint] = self._clock.monotonic_s() + self._unhealthy_s

    def _stream(self, endpoint: str, method: str, request: bytes, timeout_s: float | None) -> Any:
        call = self._channel(endpoint).unary_stream(
            SERVICE + method, request_serializer=bytes, response_deserializer=bytes
        )
        return call(request, timeout=timeout_s)

    def _channel(self, endpoint: str) -> Any:
        if endpoint not in self._channels:
            self._channels[endpoint] = grpc.aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
        return self._channels[endpoint]


def _meaning(error: Any, endpoint: str, about: str) -> LakebedError:
    code, details = error.code(), error.details() or ""
    if ABSENT in details or code is grpc.StatusCode.NOT_FOUND:
        return NotFound(f"{about} does not exist")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return Invalid(f"{about}: the filer at {endpoint} does not take this: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Invalid(f"the filer at {endpoint} is too old: {details}", hint="SeaweedFS 4.48 or later is needed")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Corrupt(f"{about}: the answer of the filer at {endpoint} is too large: {details}")
    return Unavailable(
        f"{about}: the filer at {endpoint} does not answer: {code.name.lower()}: {details}",
        hint="is it up? filer.grpc names gRPC ports: a filer's HTTP port plus 10000 unless told otherwise",
    )
