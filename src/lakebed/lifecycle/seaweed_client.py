"""Calls to SeaweedFS filers over gRPC, with fail-over: an endpoint that fails rests for a while, the next is asked.

Raises NotFound for a missing entry, Stale for a condition that does not hold, LostLog for a log that was pruned,
Unavailable when no endpoint answers, Corrupt for an answer that cannot be read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import grpc
import grpc.aio

from lakebed.clock import Clock
from lakebed.errors import Corrupt, Invalid, NotFound, Stale, Unavailable
from lakebed.ids import Ids
from lakebed.lifecycle import seaweed_wire as wire
from lakebed.lifecycle.seams import LostLog
from lakebed.lifecycle.seaweed_wire import FilerEntry, FilerEvent

SERVICE = "/filer_pb.SeaweedFiler/"
CALL_S = 10.0
STREAM_S = 120.0  # one bounded pass over the stream
REST_S = 60.0  # how long an endpoint that failed is asked last
LIST_PAGE = 1024
MESSAGE_BYTES_MAX = 64 << 20
PRECONDITION_FAILED = 6
MISSING = "no entry is found"
PRUNED = ("resume from disk", "resumefromdisk")


class FilerClient:
    def __init__(self, endpoints: Sequence[str], *, clock: Clock, ids: Ids) -> None:
        if not endpoints:
            raise Invalid("no filer is named", hint="lifecycle.filers = ['host:port'] (its gRPC port)")
        self._endpoints, self._clock = list(endpoints), clock
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._rests: dict[str, float] = {}
        self._client_id = int(ids.token()[:7], 16) + 1
        self._epoch = 0

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def lookup(self, directory: str, name: str) -> FilerEntry:
        answer = await self._call("LookupDirectoryEntry", wire.encode([(1, directory), (2, name)]))
        return wire.entry_of(wire.raw(wire.decode(answer), 1))

    async def entries(self, directory: str, *, prefix: str = "", after: str = "") -> AsyncIterator[FilerEntry]:
        """Entries of one directory in byte order behind `after`. A directory that is not there is empty."""
        while True:
            request = wire.encode([(1, directory), (2, prefix), (3, after), (5, LIST_PAGE)])
            page: list[FilerEntry] = []
            async for answer in self._stream("ListEntries", request, CALL_S * 3):
                page.append(wire.entry_of(wire.raw(wire.decode(answer), 1)))
            for entry in page:
                yield entry
            if len(page) < LIST_PAGE:
                return
            after = page[-1].name

    async def subscribe(self, prefix: str, since_ns: int, until_ns: int) -> AsyncIterator[FilerEvent]:
        """Events after `since_ns` up to `until_ns`, which ends the stream also when nothing happens."""
        self._epoch += 1
        request = wire.encode(
            [
                (1, "lakebed-lifecycle"),
                (2, prefix),
                (3, since_ns),
                (7, self._client_id),
                (8, until_ns),
                (9, self._epoch),
                (11, True),
            ]
        )
        async for answer in self._stream("SubscribeMetadata", request, STREAM_S):
            for event in wire.events_of(answer):
                if event.ts_ns > until_ns:
                    return
                yield event

    async def transact(self, lock_key: str, clauses: Sequence[bytes], mutations: Sequence[bytes]) -> None:
        """Conditions and changes in one step under the object's lock. Raises Stale when a condition does not hold."""
        condition = b"".join(wire.message(1, clause) for clause in clauses)
        request = (
            wire.encode([(1, lock_key)])
            + (wire.message(2, condition) if clauses else b"")
            + b"".join(wire.message(3, mutation) for mutation in mutations)
            + wire.encode([(7, "s3.object.write:" + lock_key)])
        )
        answer = wire.decode(await self._call("ObjectTransaction", request))
        code, error = wire.number(answer, 2), wire.text(answer, 1)
        if code == PRECONDITION_FAILED:
            raise Stale(f"{lock_key}: {error or 'a condition does not hold'}")
        if code or error:
            raise _refusal(lock_key, error)

    async def delete(self, directory: str, name: str, *, recursive: bool = False) -> None:
        request = wire.encode([(1, directory), (2, name), (4, True), (5, recursive)])
        answer = wire.decode(await self._call("DeleteEntry", request))
        if error := wire.text(answer, 1):
            raise _refusal(f"{directory}/{name}", error)

    async def _call(self, method: str, request: bytes) -> bytes:
        async def ask(channel: grpc.aio.Channel) -> bytes:
            call = channel.unary_unary(SERVICE + method)
            answer: bytes = await call(request, timeout=CALL_S)
            return answer

        return await self._any(method, ask)

    async def _any(self, method: str, ask: Callable[[grpc.aio.Channel], Awaitable[bytes]]) -> bytes:
        last: Exception | None = None
        for endpoint in self._in_order():
            try:
                return await ask(self._channel(endpoint))
            except grpc.aio.AioRpcError as error:
                last = self._judged(endpoint, method, error)
        raise Unavailable(f"no filer answers {method}: {last}") from last

    async def _stream(self, method: str, request: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        """One stream; another endpoint is tried only while nothing was given out."""
        last: Exception | None = None
        for endpoint in self._in_order():
            given = False
            call = self._channel(endpoint).unary_stream(SERVICE + method)(request, timeout=timeout_s)
            try:
                async for answer in call:
                    given = True
                    yield answer
                return
            except grpc.aio.AioRpcError as error:
                last = self._judged(endpoint, method, error)
                if given:
                    break
            except NotFound:
                return
            finally:
                call.cancel()
        raise Unavailable(f"no filer answers {method}: {last}") from last

    def _judged(self, endpoint: str, method: str, error: grpc.aio.AioRpcError) -> Exception:
        """Raises what the answer means; gives the error back when the endpoint is to blame."""
        detail = error.details() or ""
        if MISSING in detail.lower() or error.code() is grpc.StatusCode.NOT_FOUND:
            raise NotFound(detail) from None
        if any(word in detail.lower() for word in PRUNED):
            raise LostLog(f"the filer's log does not reach back: {detail}") from None
        if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
            raise Corrupt(f"{method}: {detail}") from None
        self._rests[endpoint] = self._clock.monotonic_s() + REST_S
        return Unavailable(f"{endpoint}: {error.code().name} {detail}")

    def _in_order(self) -> list[str]:
        """Healthy endpoints first; those that rest are still asked when all others fail."""
        now_s = self._clock.monotonic_s()
        return sorted(self._endpoints, key=lambda one: max(0.0, self._rests.get(one, 0.0) - now_s))

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            options = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)]
            self._channels[endpoint] = grpc.aio.insecure_channel(endpoint, options=options)
        return self._channels[endpoint]


def _refusal(what: str, error: str) -> Exception:
    if MISSING in error.lower():
        return NotFound(f"{what}: {error}")
    return Unavailable(f"{what}: {error}")
