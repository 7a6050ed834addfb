"""The hot path of reconciliation: object events of accepted/v1/, from the metadata stream of a SeaweedFS filer.

Only speeds things up: a lost event is found by the audit. The stream is asked for a while and again from the last
event seen, because a quiet server may forget a subscriber. The few fields needed are read off the wire here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator

import msgspec

from lakebed.batches import paths
from lakebed.batches.reconciler import Reconciler, Report
from lakebed.clock import Clock
from lakebed.errors import Corrupt, LakebedError, Unavailable
from lakebed.ids import Ids
from lakebed.logs import logger
from lakebed.metrics import Metrics
from lakebed.store.protocol import Store
from lakebed.store.register import Register

METHOD = "/filer_pb.SeaweedFiler/SubscribeMetadata"
LISTEN_S = 30.0  # how long one subscription is trusted
SAVE_EVERY_S = 5.0  # how often the place in the stream is noted
GROUP_MAX = 16  # events mended together
WAITING_MAX = 50_000  # events held back at once; more are mended early
GRACE_S = 10.0  # how long a winner has for its own derived writes: twice their patience
PAUSE_S = 2.0  # before asking a filer that failed again

log = logger("batches")


class Place(msgspec.Struct, frozen=True):
    """Events up to here were mended."""

    since_ns: int = 0


class Event(msgspec.Struct, frozen=True):
    """An object that appeared. `key` is empty for anything else: then only its time counts."""

    key: str
    ts_ns: int


class EventFollower:
    """Mends each manifest as it is created. `root` is the folder of this deployment: /buckets/<bucket>/<prefix>/."""

    def __init__(
        self,
        address: str,
        root: str,
        reconciler: Reconciler,
        store: Store,
        *,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        listen_s: float = LISTEN_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._address, self._root, self._reconciler = address, root, reconciler
        self._clock, self._ids, self._listen_s = clock, ids, listen_s
        self._grace_ns = round(grace_s * 1e9)
        self._place = Register(
            store, paths.EVENTS, Place, Place(), clock=clock, ids=ids, metrics=metrics, name="events"
        )

    async def run(self) -> None:
        while True:
            try:
                await self.listen()
            except LakebedError as error:
                log.warning("object events could not be followed", cause=error.message)
                await self._clock.sleep(PAUSE_S)

    async def listen(self) -> Report:
        """One subscription, from the last noted place, until its time is over. At first from now on.

        A manifest is mended a while after its event, so that its winner's own writes are not raced. What is still
        waiting at the end is told again to the next subscription: the place is noted before it.
        """
        report = Report("hot")
        since_ns = (await self._place.read()).value.since_ns or self._clock.now_ns()
        saved_s = self._clock.monotonic_s()
        waiting: deque[Event] = deque()
        async for event in subscribe(
            self._address, self._root + paths.ACCEPTED, since_ns, ids=self._ids, listen_s=self._listen_s
        ):
            since_ns = max(since_ns, event.ts_ns)
            if event.key.endswith(".json") and event.key.startswith(self._root):
                waiting.append(event)
            await self._mend_due(waiting, report)
            if self._clock.monotonic_s() - saved_s > SAVE_EVERY_S:
                await self._save(waiting[0].ts_ns - 1 if waiting else since_ns)
                saved_s = self._clock.monotonic_s()
        await self._save(waiting[0].ts_ns - 1 if waiting else since_ns)
        return report

    async def _mend_due(self, waiting: deque[Event], report: Report) -> None:
        due_ns = self._clock.now_ns() - self._grace_ns
        while waiting and (waiting[0].ts_ns <= due_ns or len(waiting) > WAITING_MAX):
            group: list[str] = []
            while waiting and len(group) < GROUP_MAX and (not group or waiting[0].ts_ns <= due_ns):
                group.append(waiting.popleft().key)
            await self._mend([key.removeprefix(self._root) for key in group], report)

    async def _mend(self, keys: list[str], report: Report) -> None:
        await asyncio.gather(*(self._reconciler.mend(key, report) for key in dict.fromkeys(keys)))

    async def _save(self, since_ns: int) -> None:
        await self._place.change(lambda at: (Place(since_ns) if at.since_ns < since_ns else at, None))


async def subscribe(address: str, prefix: str, since_ns: int, *, ids: Ids, listen_s: float) -> AsyncIterator[Event]:
    """Events under a path since a time, as they happen, for `listen_s` seconds. Raises Unavailable.

    An event without a key is given whenever nothing else came for a moment, so that its reader can tidy up.
    """
    import grpc

    request = _request(f"lakebed-{ids.token()}", prefix, since_ns, 1 + int(ids.token()[:7], 16))
    loop = asyncio.get_running_loop()
    deadline = loop.time() + listen_s
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(METHOD, request_serializer=bytes, response_deserializer=bytes)(request)
        read = asyncio.ensure_future(call.read())
        try:
            while (left_s := deadline - loop.time()) > 0:
                done, _ = await asyncio.wait([read], timeout=min(0.2, left_s))
                if not done:
                    yield Event("", 0)
                    continue
                message = read.result()
                if message is grpc.aio.EOF:
                    return
                for event in events_of(message):
                    yield event
                read = asyncio.ensure_future(call.read())
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the filer at {address} does not tell: {error.details()}") from error
        finally:
            call.cancel()
            read.cancel()


def events_of(message: bytes) -> Iterator[Event]:
    """The events in one answer of the stream, batched ones in order. Raises Corrupt for bytes that are no message."""
    directory, notification, ts_ns = "", b"", 0
    for number, value in _fields(message):
        if number == 1 and isinstance(value, bytes):
            directory = value.decode(errors="replace")
        elif number == 2 and isinstance(value, bytes):
            notification = value
        elif number == 3 and isinstance(value, int):
            ts_ns = value
        elif number == 4 and isinstance(value, bytes):
            yield from events_of(value)
    entries = dict(_fields(notification))
    new = entries.get(2)
    if not isinstance(new, bytes) or entries.get(1):
        yield Event("", ts_ns)  # a delete, an update or a heartbeat: no manifest was created
        return
    entry = dict(_fields(new))
    name = entry.get(1)
    if not isinstance(name, bytes) or entry.get(2):  # a folder
        yield Event("", ts_ns)
        return
    yield Event(f"{directory}/{name.decode(errors='replace')}", ts_ns)


def _request(client: str, prefix: str, since_ns: int, client_id: int) -> bytes:
    return b"".join(
        (
            _text(1, client),
            _text(2, prefix),
            _number(3, since_ns),
            _number(7, client_id & 0x7FFFFFFF or 1),
            _number(9, 1),
        )
    )


def _text(number: int, value: str) -> bytes:
    data = value.encode()
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of a protobuf message; the last value of a number that is not repeated counts."""
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _read_varint(data, at)
            yield number, value
        elif kind == 2:
            size, at = _read_varint(data, at)
            if at + size > len(data):
                raise Corrupt("a message of the filer ends inside a field")
            yield number, data[at : at + size]
            at += size
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise Corrupt(f"a message of the filer has wire type {kind}")


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise Corrupt("a message of the filer ends inside a number")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise Corrupt("a number of the filer is too long")
