"""A client of the filer's gRPC interface: several endpoints, the last that answered first, a timeout on everything.

NotFound, Stale and Corrupt are answers. Unavailable means that no endpoint gave one: retry later. A change whose
response was lost raises OutcomeUnknown; a conditional one may be retried, its condition then decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from lakebed.core.errors import Invalid, LakebedError, NotFound, OutcomeUnknown, Stale, Unavailable
from lakebed.core.runtime import Runtime
from lakebed.filer.batching import RequestBatcher
from lakebed.filer.codec import (
    ABSENT,
    create_request,
    delete_request,
    joined,
    list_request,
    lookup_request,
    nodes_request,
    read_events,
    read_lookup,
    read_lookups,
    read_masters,
    read_nodes,
    read_outcome,
    read_outcomes,
    read_page,
    read_started,
    subscribe_request,
    transaction_request,
)
from lakebed.filer.model import FilerEntry, FilerEvent, SkippedEntries, Transaction
from lakebed.filer.settings import FilerSettings
from lakebed.filer.transport import Connections, MessageStream, TlsFiles, grpc_address, meaning

SERVICE = "/filer_pb.SeaweedFiler/"
LIST_NODES = "/master_pb.Seaweed/ListClusterNodes"
DISCOVER_S = 30.0  # how often the masters are asked for filers
PAGE = 1024  # entries of one request
TIMEOUT_S = 10.0
UNHEALTHY_S = 60.0
IDLE_S = 30.0  # silence of a stream, heartbeats included, after which it is given up
PRECONDITION_FAILED = 6
TRANSACTIONS_MAX = 64  # in one request: the filer makes them one after the other
LOOKUPS_MAX = 256  # in one request
CALLS_MAX = 4  # such requests under way

T = TypeVar("T")


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
        self._lookups = RequestBatcher(self._look, most=LOOKUPS_MAX, calls_max=CALLS_MAX)
        self._transactions = RequestBatcher(self._transact, most=TRANSACTIONS_MAX, calls_max=CALLS_MAX)

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
        except LakebedError:
            return ()
        for master in masters:
            with suppress(grpc.aio.AioRpcError, LakebedError):
                if found := read_started(await self._nodes(master)):
                    return found
        return ()

    async def _named_masters(self) -> list[str]:
        return read_masters(await self._ask("GetFilerConfiguration", b"", "the filer's configuration"))

    async def _nodes(self, master: str) -> bytes:
        call = self._channel(master).unary_unary(LIST_NODES, request_serializer=bytes, response_deserializer=bytes)
        answer: bytes = await call(nodes_request("filer"), timeout=self._timeout_s)
        return answer

    # Reading.

    async def lookup(self, directory: str, name: str) -> FilerEntry:
        """The entry as it is now. Raises NotFound. Lookups that are wanted at the same time are one request."""
        entry = await self._lookups.ask((directory, name))
        if entry is None:
            raise NotFound(f"{directory}/{name} does not exist")
        return entry

    async def _look(self, wanted: Sequence[tuple[str, str]]) -> Sequence[FilerEntry | Exception | None]:
        requests = [lookup_request(*one) for one in wanted]
        about = "/".join(wanted[0])
        if len(wanted) == 1:
            try:
                return [read_lookup(await self._ask("LookupDirectoryEntry", requests[0], about))]
            except NotFound:
                return [None]
        return read_lookups(await self._ask("LookupDirectoryEntries", joined(requests), about))

    async def page(
        self, directory: str, *, prefix: str = "", after: str = "", inclusive: bool = False, limit: int = PAGE
    ) -> list[FilerEntry]:
        """One page of a folder by name, strictly behind `after` unless inclusive; empty when nothing follows."""
        request = list_request(directory, prefix=prefix, after=after, inclusive=inclusive, limit=limit)
        return [entry for message in await self._page(directory, request) if (entry := read_lookup(message))]

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

    async def pages(
        self, directory: str, *, prefix: str = "", after: str = "", newest_ns: int | None = None
    ) -> AsyncGenerator[Sequence[FilerEntry | SkippedEntries], None]:
        """Every entry of a folder, by pages; the next page is read while the caller works on one.

        With `newest_ns`, files that changed later are counted and not decoded.
        """

        def read(after: str) -> asyncio.Future[list[bytes]]:
            request = list_request(directory, prefix=prefix, after=after, inclusive=False, limit=PAGE)
            return asyncio.ensure_future(self._page(directory, request))

        reading = read(after)
        try:
            while messages := await reading:
                found, last = read_page(messages, newest_ns)
                if len(messages) >= PAGE:
                    reading = read(last)
                yield found
                if len(messages) < PAGE:
                    return
        finally:
            reading.cancel()

    async def _page(self, directory: str, request: bytes) -> list[bytes]:
        async def ask(endpoint: str) -> list[bytes]:
            return await self._connections.all_of(self._stream(endpoint, "ListEntries", request, self._timeout_s))

        try:
            return await self._try(ask, directory)
        except NotFound:
            return []

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
            async with aclosing(self._messages(endpoint, request, tick_s)) as messages:
                async for some in messages:
                    for event in (event for message in some for event in read_events(message)):
                        if until_ns and event.ts_ns > until_ns:
                            return
                        # The server repeats events in its memory from `since_ns` on, but not those on disk.
                        if event.heartbeat or event.ts_ns > since_ns:
                            yield event
        except grpc.RpcError as error:
            self._failed(endpoint)
            raise meaning(error, endpoint, ", ".join(prefixes)) from error

    async def _messages(self, endpoint: str, request: bytes, tick_s: float) -> AsyncGenerator[list[bytes], None]:
        """Messages of the stream; with `tick_s`, empty bytes (a heartbeat) when none came for that long."""
        stream = MessageStream(self._stream(endpoint, "SubscribeMetadata", request, None))
        heard_s = self._clock.monotonic_s()
        try:
            while self._clock.monotonic_s() - heard_s < self._idle_s:
                found = await stream.take(tick_s or self._idle_s)
                if found:
                    yield found
                    heard_s = self._clock.monotonic_s()
                elif stream.ended:
                    return
                elif tick_s:
                    yield [b""]
                else:
                    break
        finally:
            stream.cancel()
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
        """All mutations or none, when the conditions hold. Raises Stale when one does not.

        Transactions that are wanted at the same time are sent in one request; each is judged on its own.
        """
        error, code = await self._transactions.ask(transaction)
        if code == PRECONDITION_FAILED:
            raise Stale(f"{transaction.path} is not what was expected: {error}")
        if ABSENT in error:
            raise NotFound(f"{transaction.path}: {error}")
        if error or code:
            raise Unavailable(f"{transaction.path} could not be changed: {error or code}")

    async def _transact(self, wanted: Sequence[Transaction]) -> Sequence[tuple[str, int] | Exception]:
        requests = [transaction_request(one) for one in wanted]
        if len(wanted) == 1:
            return [read_outcome(await self._ask("ObjectTransaction", requests[0], wanted[0].path, change=True))]
        about = f"{wanted[0].path} and {len(wanted) - 1} more"
        found = read_outcomes(await self._ask("ObjectTransactionBatch", joined(requests), about, change=True))
        # The filer stops early when its caller seems to be gone: the rest was not tried, or its answer is lost.
        rest = [OutcomeUnknown(f"{one.path}: the filer did not answer") for one in wanted[len(found) :]]
        return [*found[: len(wanted)], *rest]

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
            except grpc.RpcError as error:
                last = meaning(error, endpoint, about)
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
        return self._connections.streaming(endpoint).unary_stream(SERVICE + method)(request, timeout=timeout_s)

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
                last = meaning(error, master, "the list of filers")
                continue
            if nodes:
                self._endpoints = list(dict.fromkeys([*self._given, *map(grpc_address, nodes)]))
                self._discovered_s = now_s
                return
        if not self._endpoints:
            raise last
        # Those known before are kept, and the masters get some time to come back.
        self._discovered_s = now_s
