"""The filer's client: order of endpoints, meanings of refusals, silence, and what callers build on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, Invalid, NotFound, OutcomeUnknown, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.core.settings import Contradiction, load
from lakebed.filer import checks as doctor
from lakebed.filer.client import FilerClient
from lakebed.filer.codec import (
    ABSENT,
    read_entry,
    read_events,
    read_outcome,
    subscribe_request,
    transaction_request,
    write_entry,
)
from lakebed.filer.flush import BALLAST_BYTES, flush
from lakebed.filer.model import (
    Attributes,
    Clause,
    ConditionKind,
    FileChunk,
    FilerEntry,
    FilerEvent,
    Mutation,
    MutationKind,
    Transaction,
)
from lakebed.filer.protobuf import encode_field
from lakebed.filer.settings import FilerSettings
from lakebed.filer.transport import meaning
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import sections
from support.scripted_filer import GUARDED, Scripted, Stream, change
from support.wire import fields

FOUND = encode_field(1, write_entry(FilerEntry("k")))


class Refusal(Exception):
    def __init__(self, code: grpc.StatusCode, details: str | None) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details


MEANINGS = [
    (grpc.StatusCode.UNKNOWN, f"filer: {ABSENT} in store", NotFound),
    (grpc.StatusCode.NOT_FOUND, None, NotFound),
    (grpc.StatusCode.INVALID_ARGUMENT, "bad path", Invalid),
    (grpc.StatusCode.UNIMPLEMENTED, "no such method", Invalid),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "too large", Corrupt),
    (grpc.StatusCode.UNAVAILABLE, "refused", Unavailable),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "", Unavailable),
    (grpc.StatusCode.UNKNOWN, "disk full", Unavailable),
]


@pytest.mark.parametrize(("code", "details", "kind"), MEANINGS, ids=lambda one: str(one)[:30])
def test_a_refusal_has_its_meaning(code: grpc.StatusCode, details: str | None, kind: type) -> None:
    """Answers are told from outages; each names what was asked or which filer."""
    found = meaning(Refusal(code, details), "host:1", "/buckets/b/k")

    assert kind is type(found)
    assert "/buckets/b/k" in found.message or "host:1" in found.message
    if code is grpc.StatusCode.UNIMPLEMENTED:
        assert "too old" in found.message and "4.48" in (found.hint or "")


async def test_a_filer_that_failed_is_asked_last_until_its_time_is_over() -> None:
    """For `unhealthy_s`; then the order given counts again. One that answers is healthy at once."""
    down = {"one"}
    client = Scripted(lambda endpoint, _: grpc.StatusCode.UNAVAILABLE if endpoint in down else FOUND)
    clock: Any = client._clock
    await client.lookup("/d", "k")
    down.clear()
    await client.lookup("/d", "k")
    await clock.advance(59.9)
    await client.lookup("/d", "k")
    await clock.advance(0.1)
    await client.lookup("/d", "k")

    assert ["one", "two", "two", "two", "one"] == client.asked


async def test_of_failed_filers_the_one_that_failed_first_is_asked_first() -> None:
    """It has had the longest time to come back."""
    client = Scripted(lambda *_: FOUND)
    clock: Any = client._clock
    client._failed("two")
    await clock.advance(5.0)
    client._failed("one")

    assert ["two", "one"] == client._in_order()
    await client.lookup("/d", "k")
    assert ["two", "one"] == client._in_order()
    assert ["two"] == client.asked


def test_a_filer_named_twice_is_one_and_none_is_refused() -> None:
    """The hint names the setting."""
    client = FilerClient(["a:1", "b:1", "a:1"], Runtime(clock=ManualClock(), ids=Ids(), metrics=Metrics()))
    assert ["a:1", "b:1"] == client._in_order()
    with pytest.raises(Invalid) as caught:
        FilerClient([], Runtime(clock=ManualClock(), ids=Ids(), metrics=Metrics()))
    assert "filer.grpc" in (caught.value.hint or "")


def test_the_settings_name_filers_and_limits() -> None:
    """Comma between, blanks aside; a client made of them keeps to them; no time at all is refused."""
    settings = FilerSettings(grpc=" a:1 , ,b:2", timeout_s=3.0, unhealthy_s=4.0)
    client = FilerClient.of(settings, Runtime(clock=ManualClock(), ids=Ids(), metrics=Metrics()))

    assert (("a:1", "b:2"), ()) == (settings.endpoints, FilerSettings().endpoints)
    assert (3.0, 4.0) == (client._timeout_s, client._unhealthy_s)
    with pytest.raises(Contradiction):
        FilerSettings(timeout_s=0).check()


async def test_a_lookup_without_an_entry_is_not_found_and_an_empty_folder_has_no_page() -> None:
    """An answer that holds nothing says so; a folder that is not there holds nothing."""
    with pytest.raises(NotFound, match="/d/k does not exist"):
        await Scripted(lambda *_: b"").lookup("/d", "k")

    class Missing(Scripted):
        async def _try(self, ask: Any, about: str, *, change: bool = False) -> Any:
            raise NotFound(about)

    assert [] == await Missing(lambda *_: []).page("/d")


async def test_a_page_says_what_it_asks_for() -> None:
    """Folder, prefix, start and limit are the filer's fields 1, 2, 3 and 5."""
    asked: list[dict[int, Any]] = []

    def answer(_: str, request: bytes) -> list[bytes]:
        asked.append(dict(fields(request)))
        return []

    assert [] == [one async for one in Scripted(answer).entries("/d", prefix="p", after="a", inclusive=True, limit=7)]
    assert [{1: b"/d", 2: b"p", 3: b"a", 4: 1, 5: 7}] == asked


async def test_a_deletion_of_what_is_not_there_is_success() -> None:
    """Said as a refusal or inside the answer; any other refusal is an outage, and it asks for the bytes too."""
    asked: list[dict[int, Any]] = []

    def answer(_: str, request: bytes) -> bytes:
        asked.append(dict(fields(request)))
        return encode_field(1, f"{ABSENT}: k".encode())

    await Scripted(answer).delete("/d", "k", recursive=True)
    assert [{1: b"/d", 2: b"k", 4: 1, 5: 1}] == asked
    await Scripted(lambda *_: grpc.StatusCode.NOT_FOUND).delete("/d", "k")
    await Scripted(lambda *_: b"").delete("/d", "k")
    with pytest.raises(Unavailable, match="folder not empty"):
        await Scripted(lambda *_: encode_field(1, b"folder not empty")).delete("/d", "k")
    with pytest.raises(OutcomeUnknown):
        await Scripted(lambda *_: grpc.StatusCode.DEADLINE_EXCEEDED).delete("/d", "k")


async def test_a_file_that_could_not_be_created_is_an_outage() -> None:
    """The ballast travels as the change's signatures."""
    asked: list[dict[int, Any]] = []

    def answer(_: str, request: bytes) -> bytes:
        asked.append(dict(fields(request)))
        return b""

    await Scripted(answer).create("/d", "k", ballast_bytes=3)
    assert (b"/d", "k", b"\x01\x01\x01") == (asked[0][1], read_entry(asked[0][2]).name, asked[0][5])
    with pytest.raises(Unavailable, match="could not be created: no room"):
        await Scripted(lambda *_: encode_field(1, b"no room")).create("/d", "k")


async def test_a_change_that_failed_without_words_is_an_outage() -> None:
    """A code alone counts."""
    with pytest.raises(Unavailable, match="could not be changed: 3"):
        await Scripted(lambda *_: encode_field(2, 3)).transact(GUARDED)
    assert ("", 0) == read_outcome(b"")


class Silent:
    """A stream that says nothing until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        self.cancelled.wait()
        yield from ()

    def cancel(self) -> None:
        self.cancelled.set()


async def test_a_silent_stream_is_given_up_and_its_filer_asked_last() -> None:
    """The call is cancelled: a stream that nobody reads must not stay open."""
    client, stream = Scripted(lambda *_: []), Silent()
    client._stream = lambda *_: stream  # type: ignore[method-assign]
    client._idle_s = 0.01
    with pytest.raises(Unavailable, match="one sent nothing for 0 s"):
        [event async for event in client.subscribe(["/buckets"], since_ns=0)]

    assert stream.cancelled.is_set()
    assert ["two", "one"] == client._in_order()


async def test_a_silent_stream_is_given_up_though_its_reader_is_woken_all_the_time() -> None:
    """Only what the filer sends is heard of it: heartbeats that the client makes itself are not."""
    client, stream = Scripted(lambda *_: []), Silent()
    client._stream = lambda *_: stream  # type: ignore[method-assign]
    clock: Any = client._clock
    woken = 0
    with pytest.raises(Unavailable, match="one sent nothing for 30 s"):
        async for event in client.subscribe(["/buckets"], since_ns=0, tick_s=0.001):
            woken += event.heartbeat
            assert woken <= 3
            await clock.advance(10.0)

    assert (3, True) == (woken, stream.cancelled.is_set())


async def test_a_caller_that_works_long_does_not_make_its_filer_silent() -> None:
    """Only time in which the caller waits for the filer counts."""
    client = Scripted(lambda *_: [])
    client._stream = lambda *_: Stream([change(5)])  # type: ignore[method-assign]
    clock: Any = client._clock
    seen: list[int] = []
    async for event in client.subscribe(["/buckets"], since_ns=0):
        seen.append(event.ts_ns)
        await clock.advance(60.0)

    assert ([5], ["one", "two"]) == (seen, client._in_order())


async def test_a_page_that_nobody_waits_for_any_more_is_cancelled() -> None:
    """Its thread is free for other listings."""
    client, stream = Scripted(lambda *_: []), Silent()
    client._stream = lambda *_: stream  # type: ignore[method-assign]
    page = asyncio.create_task(client.page("/buckets/b"))
    await asyncio.sleep(0.01)

    page.cancel()
    await asyncio.gather(page, return_exceptions=True)

    assert stream.cancelled.is_set()


async def test_a_broken_stream_is_an_outage_of_its_filer() -> None:
    """What came before is given; the next subscription is with another filer."""
    client = Scripted(lambda *_: [])

    def broken() -> Iterator[bytes]:
        yield change(6)
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details="gone")

    client._stream = lambda *_: Stream(broken())  # type: ignore[method-assign]
    found: list[int] = []
    with pytest.raises(Unavailable, match="gone"):
        async for event in client.subscribe(["/buckets"], since_ns=0):
            found.append(event.ts_ns)

    assert ([6], ["two", "one"]) == (found, client._in_order())


async def test_heartbeats_come_through_whatever_their_time() -> None:
    """They carry the log's progress on a quiet cluster; a change at the start is left out."""
    beat = encode_field(3, 5)
    client = Scripted(lambda *_: [beat, change(5), change(6)])
    found = [event async for event in client.subscribe(["/buckets"], since_ns=5)]

    assert [(5, True), (6, False)] == [(event.ts_ns, event.heartbeat) for event in found]


async def test_a_subscription_says_what_it_wants() -> None:
    """Every prefix, from where, until where, with heartbeats, under a name and number of its own."""
    said: list[dict[int, list[Any]]] = []

    def answer(_: str, request: bytes) -> list[bytes]:
        found: dict[int, list[Any]] = {}
        for number, value in fields(request):
            found.setdefault(number, []).append(value)
        said.append(found)
        return []

    client = Scripted(answer)
    for _ in range(2):
        [event async for event in client.subscribe(["/a/", "/b/", "/c/"], since_ns=5, until_ns=9)]
    first, second = said

    assert ([b"/a/"], [5], [b"/b/", b"/c/"], [9]) == (first[2], first[3], first[6], first[8])
    assert ([1], [1]) == (first[11], first[13])
    assert first[1] != second[1] and first[7] != second[7]
    assert first[1][0].startswith(b"lakebed-") and first[7][0] >= 1
    everything = dict(fields(subscribe_request("c", [], since_ns=0, until_ns=0, client_id=1, heartbeats=False)))
    assert (b"/", False, False) == (everything[2], 13 in everything, 3 in everything)


async def test_a_subscription_to_a_directory_asks_for_its_own_entries_only() -> None:
    """Nothing below them: a prefix that matches nothing stands where the server would take none as everything."""
    said: list[dict[int, Any]] = []

    def answer(_: str, request: bytes) -> list[bytes]:
        said.append(dict(fields(request)))
        return []

    [event async for event in Scripted(answer).subscribe([], since_ns=5, directories=["/buckets"])]

    (asked,) = said
    assert (b"/buckets", 5, False) == (asked[10], asked[3], 6 in asked)
    assert not b"/buckets/b/k".startswith(asked[2])


# Entries and events.


def test_an_entrys_size_is_the_largest_that_is_known_and_its_head_is_the_first_chunk() -> None:
    """By attributes, by the end of its last chunk, or by its own bytes; chunks come in any order."""
    chunks = (FileChunk("2,b", 10, 5), FileChunk("2,a", 0, 10))
    assert (15, "2,a") == (FilerEntry("k", chunks=chunks).size, FilerEntry("k", chunks=chunks).head_fid)
    assert 20 == FilerEntry("k", attributes=Attributes(file_size=20), chunks=chunks).size
    assert (3, "", "") == (
        FilerEntry("k", content=b"abc").size,
        FilerEntry("k").head_fid,
        FilerEntry("k").text("missing"),
    )


EVENTS = [
    (FilerEvent("/d", 1), (True, False, "")),
    (FilerEvent("/d", 1, unreadable="why"), (False, False, "")),
    (FilerEvent("/d", 1, new=FilerEntry("n")), (False, True, "/d/n")),
    (FilerEvent("/d", 1, old=FilerEntry("o")), (False, False, "/d/o")),
    (FilerEvent("/d", 1, old=FilerEntry("o"), new=FilerEntry("n"), new_parent="/e"), (False, False, "/e/n")),
]


@pytest.mark.parametrize(("event", "expected"), EVENTS, ids=range(len(EVENTS)))
def test_an_event_says_what_happened_and_where(event: FilerEvent, expected: tuple[bool, bool, str]) -> None:
    """Nothing, a creation, an end, or a move."""
    assert expected == (event.heartbeat, event.created, event.path)


def test_a_change_whose_entry_cannot_be_read_keeps_its_place_and_time() -> None:
    """It blocks its stream there instead of being skipped."""
    broken = encode_field(1, b"/buckets/b") + encode_field(2, encode_field(2, b"\xff\xff\xff")) + encode_field(3, 9)
    (event,) = read_events(broken)

    assert ("/buckets/b", 9, True, None, None) == (
        event.directory,
        event.ts_ns,
        bool(event.unreadable),
        event.old,
        event.new,
    )


def test_a_moved_entry_names_its_new_folder() -> None:
    """Old, new and the folder it went to are fields 1, 2 and 4 of the notification."""
    inside = (
        encode_field(1, write_entry(FilerEntry("o")))
        + encode_field(2, write_entry(FilerEntry("n")))
        + encode_field(4, b"/e")
    )
    (event,) = read_events(encode_field(1, b"/d") + encode_field(2, inside) + encode_field(3, 4))

    assert ("o", "n", "/e/n") == (event.old and event.old.name, event.new and event.new.name, event.path)


def test_a_transaction_travels_with_all_of_its_fields() -> None:
    """Each clause and each mutation, in order; what is read back is what was said."""
    clause = Clause(ConditionKind.ETAG_MATCH, ("e1", "e2"), 7, "key", "value", ("3,01",), b"raw")
    put = Mutation(MutationKind.PUT, "/d", "n", FilerEntry("n"), remove_empty_parent=True)
    gone = Mutation(MutationKind.DELETE, "/d", "o", delete_data=True, recursive=True)
    patch = Mutation(MutationKind.PATCH_EXTENDED, "/d", "p", set_extended={"a": b"1"}, delete_extended=("b", "c"))
    data = transaction_request(Transaction("/d/n", (clause,), (put, gone, patch), "/at"))

    def read(raw: Any) -> list[tuple[int, Any]]:
        return list(fields(raw))

    whole = read(data)
    assert [1, 2, 3, 3, 3, 6, 7] == [number for number, _ in whole]
    assert (b"/d/n", b"/at", b"s3.object.write:/d/n") == (whole[0][1], whole[5][1], whole[6][1])
    ((_, inner),) = read(whole[1][1])
    assert [(1, 3), (2, b"e1"), (2, b"e2"), (3, 7), (5, b"key"), (6, b"value"), (9, b"3,01"), (10, b"raw")] == read(
        inner
    )
    first, second, third = (dict(read(value)) for number, value in whole if number == 3)
    assert (b"/d", b"n", 1, False) == (first[2], first[3], first[13], 1 in first)
    assert (1, b"o", 1, 1) == (second[1], second[3], second[7], second[8])
    assert [b"b", b"c"] == [value for number, value in read(whole[4][1]) if number == 6]
    assert {1: b"a", 2: b"1"} == dict(read(third[5]))


# The flush and the doctor.


class LogFiler:
    """A filer whose log is written `after` creates; `at_ns` is when its newest piece was."""

    def __init__(self, clock: ManualClock, *, works: bool = True, fails: bool = False) -> None:
        self.clock, self.works, self.fails = clock, works, fails
        self.created: list[int] = []
        self.days: dict[str, list[FilerEntry]] = {"2026-11-15": [self.piece("23-59", clock.now_ns() - 10**12)]}

    def piece(self, name: str, at_ns: int) -> FilerEntry:
        return FilerEntry(
            name, chunks=(FileChunk("1,01", modified_ts_ns=at_ns), FileChunk("1,02", modified_ts_ns=at_ns - 5))
        )

    async def create(self, directory: str, name: str, *, ballast_bytes: int = 0) -> None:
        if self.fails:
            raise Unavailable("away")
        self.created.append(ballast_bytes)
        if ballast_bytes and self.works:
            self.days["2026-11-16"] = [self.piece("00-01", self.clock.now_ns()), self.piece("00-00", 5)]

    async def entries(self, directory: str) -> AsyncGenerator[FilerEntry, None]:
        day = directory.rpartition("/")[2]
        found = [FilerEntry(name, True) for name in self.days] if day == "log" else self.days[day]
        for entry in found:
            yield entry


async def test_a_flush_is_proven_by_the_newest_piece_of_the_newest_day() -> None:
    """A small change first, then one that does not fit the buffer; True only when the log is younger than that."""
    clock = ManualClock()
    filer = LogFiler(clock)
    assert await flush(filer, clock)  # type: ignore[arg-type]
    assert [0, BALLAST_BYTES] == filer.created
    assert 8 * 1024 * 1024 < BALLAST_BYTES


async def test_a_flush_that_is_not_seen_or_fails_is_false(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks ends the filer in order; nothing is raised."""
    clock = ManualClock()
    monkeypatch.setattr("lakebed.filer.flush.FLUSH_S", 0.01)
    unseen = LogFiler(clock, works=False)
    unseen.days = {"2026-11-16": [unseen.piece("00-01", clock.now_ns() - 1)]}
    empty = LogFiler(clock, works=False)
    empty.days = {}

    for filer in (unseen, empty, LogFiler(clock, fails=True)):
        assert not await flush(filer, clock)  # type: ignore[arg-type]


async def test_the_doctor_asks_each_filer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has no such bucket belongs to another cluster; one that is away says so; none named is no line."""
    asked: list[tuple[str, str, str]] = []

    class Filer:
        def __init__(self, settings: FilerSettings) -> None:
            self.settings = settings

        async def __aenter__(self) -> Filer:
            return self

        async def __aexit__(self, *_: object) -> None:
            return None

        async def lookup(self, directory: str, name: str) -> FilerEntry:
            asked.append((self.settings.grpc, directory, name))
            if self.settings.grpc == "b:2":
                raise NotFound("no")
            if self.settings.grpc == "c:3":
                raise Unavailable("away", hint="is it up?")
            return FilerEntry(name)

    monkeypatch.setattr(doctor.FilerClient, "of", lambda settings, runtime: Filer(settings))
    clock = ManualClock()

    def context(**stack: str) -> Context:
        settings = load(sections(), stack={"store.url": "s3://lake", **stack})
        return Context(
            node="n", settings=settings, store=MemoryStore(clock=clock), clock=clock, ids=Ids(), metrics=Metrics()
        )

    found = await doctor.checks(context(**{"filer.grpc": "a:1,b:2,c:3"}))

    assert [("filer a:1", "pass"), ("filer b:2", "fail"), ("filer c:3", "fail")] == [
        (one.name, one.verdict) for one in found
    ]
    assert [(name, "/buckets", "lake") for name in ("a:1", "b:2", "c:3")] == asked
    assert "has bucket 'lake'" in found[0].seen and "has no bucket 'lake'" in found[1].seen and found[1].fix
    assert ("away", "is it up?") == (found[2].seen, found[2].fix)
    assert [] == await doctor.checks(context())
    assert msgspec.structs.asdict(found[0])["fix"] == ""


async def test_a_stream_that_talks_now_and_then_is_never_given_up() -> None:
    """The silence is counted from the last message, however long the stream has been open."""
    client = Scripted(lambda *_: [])
    clock: Any = client._clock
    messages = [change(number) for number in range(1, 6)]

    loop = asyncio.get_running_loop()

    def slow() -> Iterator[bytes]:
        for message in messages:
            asyncio.run_coroutine_threadsafe(clock.advance(20.0), loop).result()
            yield message

    client._stream = lambda *_: Stream(slow())  # type: ignore[method-assign]
    found = [event.ts_ns async for event in client.subscribe(["/buckets"], since_ns=0)]

    assert [1, 2, 3, 4, 5] == found
