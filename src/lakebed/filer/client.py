"""A client of the filer's gRPC interface: several endpoints, the last that answered first, a timeout on everything.

NotFound, Stale and Corrupt are answers. Unavailable means that no endpoint gave one: retry later. A change whose
response was lost raises OutcomeUnknown; a conditional one may be retried, its condition then decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from lakebed.core.clock import Clock
from lakebed.core.errors import Corrupt, Invalid, LakebedError, NotFound, OutcomeUnknown, Stale, Unavailable
from lakebed.core.runtime import Runtime
from lakebed.filer.codec import (
    create_request,
    delete_request,
    list_request,
    lookup_request,
    nodes_request,
    read_events,
    read_lookup,
    read_masters,
    read_nodes,
    read_outcome,
    read_started,
    subscribe_request,
    transaction_request,
)
from lakebed.filer.model import FilerEntry, FilerEvent, Transaction
from lakebed.filer.settings import FilerSettings
from lakebed.filer.transport import Connections, TlsFiles, grpc_address

SERVICE = "/filer_pb.SeaweedFiler/"
LIST_NODES = "/master_pb.Seaweed/ListClusterNodes"
DISCOVER_S = 30.0  # how often the masters are asked for filers
PAGE = 1024  # entries of one request
TIMEOUT_S = 10.0
UNHEALTHY_S = 60.0
IDLE_S = 30.0  # silence of a stream, heartbeats included, after which it is given up
ABSENT = "no entry is found"  # the filer's text, in an unknown error, for an entry that does not exist
PRECONDITION_FAILED = 6

T = TypeVar("T")

LOG = "/topics/.system/log"  # a folder for each day, a file for each minute and filer
SCRATCH = "/lakebed"
BALLAST_BYTES = 9 * 1024 * 1024  # the buffer has 8 MiB
FLUSH_S = 5.0  # all of it; it takes less than one
FLUSH_CHECK_S = 0.05


class FilerClient:
    def __init__(
        self,
        endpoints: Sequence[str],
        runtime: Runtime,
        *,
        timeout_s: float = TIMEOUT_S,
        unhealthy_s: float = UNHEALTHY_S,
        idle_s: float = IDLE_S,
        masters: Sequence[str] = (),
        tls: TlsFiles = TlsFiles(),
    ) -> None:
        """`masters` are asked for more filers, and again every DISCOVER_S; `endpoints` may be empty then."""
        if not endpoints and not masters:
            raise Invalid("no filer is configured", hint="set filer.grpc to host:port of a filer's gRPC port")
        self._clock, self._ids = runtime.clock, runtime.ids
        self._timeout_s, self._unhealthy_s, self._idle_s = timeout_s, unhealthy_s, idle_s
        self._given = self._endpoints = list(dict.fromkeys(endpoints))
        self._masters, self._discovered_s = list(dict.fromkeys(masters)), float("-inf")
        self._failed_until_s: dict[str, float] = {}
        self._connections = Connections(tls)

    @classmethod
    def of(cls, settings: FilerSettings, runtime: Runtime) -> Self:
        """Raises Invalid when the settings have no filer."""
        return cls(
            settings.endpoints,
            runtime,
            timeout_s=settings.timeout_s,
            unhealthy_s=settings.unhealthy_s,
            masters=settings.masters_given,
            tls=TlsFiles(settings.tls_ca, settings.tls_cert, settings.tls_key, settings.tls_server_name),
        )

    async def close(self) -> None:
        await self._connections.close()

    async def __aenter__(self) -> FilerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def known(self) -> list[str]:
        """The filers' gRPC addresses, in the order in which they are tried. Raises Unavailable."""
        await self._discover()
        return self._in_order()

    async def started(self) -> tuple[tuple[str, int], ...]:
        """The filers of the cluster, and when each joined it: a filer that was restarted joined anew.

        The masters know; where none is configured, a filer names them. Empty when no master answers.
        """
        try:
            masters = self._masters or [grpc_address(one) for one in await self._named_masters()]
            for master in masters:
                if found := read_started(await self._nodes(master)):
                    return found
        except (grpc.aio.AioRpcError, LakebedError):
            pass
        return ()

    async def _named_masters(self) -> list[str]:
        return read_masters(await self._ask("GetFilerConfiguration", b"", "the filer's configuration"))

    async def _nodes(self, master: str) -> bytes:
        call = self._channel(master).unary_unary(LIST_NODES, request_serializer=bytes, response_deserializer=bytes)
        answer: bytes = await call(nodes_request("filer"), timeout=self._timeout_s)
        return answer

    # Reading.

    async def lookup(self, directory: str, name: str) -> FilerEntry:
        """The entry as it is now. Raises NotFound."""
        request = lookup_request(directory, name)
        answer = await self._ask("LookupDirectoryEntry", request, f"{directory}/{name}")
        entry = read_lookup(answer)
        if entry is None:
            raise NotFound(f"{directory}/{name} does not exist")
        return entry

    async def page(
        self, directory: str, *, prefix: str = "", after: str = "", inclusive: bool = False, limit: int = PAGE
    ) -> list[FilerEntry]:
        """One page of a folder by name, strictly behind `after` unless inclusive; empty when nothing follows."""
        request = list_request(directory, prefix=prefix, after=after, inclusive=inclusive, limit=limit)

        async def ask(endpoint: str) -> list[FilerEntry]:
            call = self._stream(endpoint, "ListEntries", request, self._timeout_s)
            return [entry async for message in call if (entry := read_lookup(message)) is not None]

        try:
            return await self._try(ask, directory)
        except NotFound:
            return []

    async def entries(
        self, directory: str, *, prefix: str = "", after: str = "", inclusive: bool = False, limit: int = PAGE
    ) -> AsyncGenerator[FilerEntry, None]:
        """Every entry of a folder, page by page. Not a snapshot: entries created meanwhile may be missing."""
        while True:
            found = await self.page(directory, prefix=prefix, after=after, inclusive=inclusive, limit=limit)
            for entry in found:
                yield entry
            if len(found) < limit:
                return
            after, inclusive = found[-1].name, False

    async def subscribe(
        self,
        prefixes: Sequence[str],
        *,
        since_ns: int,
        until_ns: int = 0,
        tick_s: float = 0.0,
        directories: Sequence[str] = (),
    ) -> AsyncGenerator[FilerEvent, None]:
        """Changes under the prefixes, and of entries right in the directories, strictly after `since_ns`, in the order
        of the log; heartbeats come through.

        With `until_ns` it ends behind the last change not later than that, on a quiet cluster too; without, it goes
        on until the caller stops. With `tick_s` a heartbeat is given whenever nothing came for so long. Raises
        Unavailable when the stream breaks: go on from the last change seen, which may be with another filer.
        """
        await self._discover()
        endpoint = self._in_order()[0]
        request = subscribe_request(
            f"lakebed-{self._ids.token()}",
            prefixes,
            since_ns=since_ns,
            until_ns=until_ns,
            client_id=1 + int(self._ids.token()[:7], 16),
            heartbeats=True,
            directories=directories,
        )
        try:
            messages = self._messages(endpoint, request, tick_s)
            async with aclosing(messages):
                async for message in messages:
                    for event in read_events(message):
                        if until_ns and event.ts_ns > until_ns:
                            return
                        # The server repeats events in its memory from `since_ns` on, but not those on disk.
                        if event.heartbeat or event.ts_ns > since_ns:
                            yield event
        except grpc.aio.AioRpcError as error:
            self._failed(endpoint)
            raise _meaning(error, endpoint, ", ".join(prefixes)) from error

    async def _messages(self, endpoint: str, request: bytes, tick_s: float) -> AsyncGenerator[bytes, None]:
        """Messages of the stream; with `tick_s`, empty bytes (a heartbeat) when none came for that long."""
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
        raise Unavailable(f"the filer at {endpoint} sent nothing for {self._idle_s:.0f} s")

    # Changing.

    async def delete(self, directory: str, name: str, *, recursive: bool = False) -> None:
        """Removes an entry and its bytes, unconditionally. Succeeds when it does not exist."""
        request = delete_request(directory, name, delete_data=True, recursive=recursive)
        try:
            error, _ = read_outcome(await self._ask("DeleteEntry", request, f"{directory}/{name}", change=True))
        except NotFound:
            return
        if error and ABSENT not in error:
            raise Unavailable(f"{directory}/{name} could not be deleted: {error}")

    async def create(self, directory: str, name: str, *, ballast_bytes: int = 0) -> None:
        """Creates or replaces an empty file. The ballast enlarges the change event and is not stored."""
        request = create_request(directory, FilerEntry(name), ballast_bytes=ballast_bytes)
        error, _ = read_outcome(await self._ask("CreateEntry", request, f"{directory}/{name}", change=True))
        if error:
            raise Unavailable(f"{directory}/{name} could not be created: {error}")

    async def transact(self, transaction: Transaction) -> None:
        """All mutations or none, when the conditions hold. Raises Stale when one does not."""
        request = transaction_request(transaction)
        answer = await self._ask("ObjectTransaction", request, transaction.path, change=True)
        error, code = read_outcome(answer)
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
        await self._discover()
        last: LakebedError = Unavailable("no filer is configured")
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
        return self._connections.to(endpoint)

    async def _discover(self) -> None:
        """Asks the masters which filers there are, when it is time. Raises Unavailable when none is known at all.

        Only the leading master knows the filers, so one that names none does not count as an answer.
        """
        now_s = self._clock.monotonic_s()
        if not self._masters or now_s - self._discovered_s < DISCOVER_S:
            return
        last: LakebedError = Unavailable("no master names a filer", hint="check filer.masters")
        for master in self._masters:
            try:
                nodes = read_nodes(await self._nodes(master))
            except grpc.aio.AioRpcError as error:
                last = _meaning(error, master, "the list of filers")
                continue
            if nodes:
                self._endpoints = list(dict.fromkeys([*self._given, *map(grpc_address, nodes)]))
                self._discovered_s = now_s
                return
        if not self._endpoints:
            raise last
        # Those known before are kept, and the masters get some time to come back.
        self._discovered_s = now_s


def _meaning(error: Any, endpoint: str, about: str) -> LakebedError:
    code, details = error.code(), error.details() or ""
    if ABSENT in details or code is grpc.StatusCode.NOT_FOUND:
        return NotFound(f"{about} does not exist")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return Invalid(f"{about}: the filer at {endpoint} refused the request: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Invalid(f"the filer at {endpoint} is too old: {details}", hint="SeaweedFS 4.48 or later is needed")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Corrupt(f"{about}: the response of the filer at {endpoint} is too large: {details}")
    return Unavailable(
        f"{about}: the filer at {endpoint} does not answer: {code.name.lower()}: {details}",
        hint="check that it runs, and that filer.grpc has its gRPC port: the HTTP port plus 10000 by default",
    )


async def flush(filer: FilerClient, clock: Clock) -> bool:
    """Makes the filer write the changes it holds in memory. Otherwise it writes each minute, and at a shutdown (15 s).

    It also writes its buffer when a change does not fit. So one change is made that never fits: an entry of a few bytes
    with a list of a few million signatures, which the filer passes on and does not store.

    True when the newest chunk of the log on disk is younger than that change, so every earlier change is on disk. False
    when that is not seen in time, or the filer fails. Nothing is raised: the caller then shuts the filer down in order.
    """
    try:
        async with asyncio.timeout(FLUSH_S):
            await filer.create(SCRATCH, "flush")  # an empty buffer would write nothing
            began_ns = clock.now_ns()
            await filer.create(SCRATCH, "flush", ballast_bytes=BALLAST_BYTES)
            while await _newest_ns(filer) < began_ns:
                await clock.sleep(FLUSH_CHECK_S)
    except (LakebedError, TimeoutError):
        return False
    return True


async def _newest_ns(filer: FilerClient) -> int:
    """When the last chunk of the log was written; 0 when there is none."""
    days = [entry.name async for entry in filer.entries(LOG)]
    if not days:
        return 0
    files = [entry async for entry in filer.entries(f"{LOG}/{max(days)}")]
    return max((chunk.modified_ts_ns for file in files for chunk in file.chunks), default=0)
