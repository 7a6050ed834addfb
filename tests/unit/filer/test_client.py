"""The filer's client over scripted answers: pages, streams, conditions, and changes whose answer was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from lakebed.core.errors import Corrupt, NotFound, OutcomeUnknown, Stale, Unavailable
from lakebed.filer.client import PRECONDITION_FAILED, FilerClient
from lakebed.filer.codec import joined, write_entry
from lakebed.filer.model import FilerEntry
from lakebed.filer.protobuf import encode_field
from support.scripted_filer import GUARDED, Scripted, change
from support.wire import fields


async def test_a_folder_is_read_page_by_page_each_entry_once() -> None:
    """Behind the first page it goes on strictly after the last name, also when the beginning was inclusive."""
    names = ["a", "b", "c", "d", "e"]

    def page(_: str, request: bytes) -> list[bytes]:
        said = dict(fields(request))
        after, limit = bytes(said.get(3, b"")).decode(), int(said[5])  # type: ignore[arg-type]
        inside = [name for name in names if name > after or (said.get(4) and name == after)]
        return [encode_field(1, write_entry(FilerEntry(name))) for name in inside[:limit]]

    client = Scripted(page)

    found = [entry.name async for entry in client.entries("/buckets/b", after="b", inclusive=True, limit=2)]
    assert ["b", "c", "d", "e"] == found


async def test_a_stream_gives_what_is_after_its_start_up_to_its_end() -> None:
    """The start is exclusive and the end inclusive, whatever the server tells again from its memory."""
    client = Scripted(lambda *_: [change(ts_ns) for ts_ns in (4, 5, 6, 7, 8)])

    found = [event.ts_ns async for event in client.subscribe(["/buckets"], since_ns=5, until_ns=7)]

    assert [6, 7] == found


async def test_a_condition_that_does_not_hold_is_stale_and_an_absent_entry_is_not_found() -> None:
    """Refusals are told apart: neither is retried with another filer as if it were an outage."""
    refused = Scripted(lambda *_: encode_field(1, b"no") + encode_field(2, PRECONDITION_FAILED))
    with pytest.raises(Stale):
        await refused.transact(GUARDED)
    with pytest.raises(NotFound):
        await Scripted(lambda *_: encode_field(1, b"no entry is found in store")).transact(GUARDED)
    with pytest.raises(Unavailable):
        await Scripted(lambda *_: encode_field(1, b"disk full")).transact(GUARDED)

    assert ["one"] == refused.asked


async def test_a_change_whose_answer_was_lost_is_not_known_and_not_sent_to_another_filer() -> None:
    """A deadline that passes says nothing about the change; a question may simply be asked elsewhere."""
    client = Scripted(lambda endpoint, _: grpc.StatusCode.DEADLINE_EXCEEDED if endpoint == "one" else b"")

    with pytest.raises(OutcomeUnknown):
        await client.transact(GUARDED)
    assert ["one"] == client.asked

    await client.transact(GUARDED)  # the filer that failed is asked last now
    assert ["one", "two"] == client.asked


async def test_a_filer_that_cannot_be_reached_is_passed_over() -> None:
    """The next one is asked; when none answers the caller is told to come back."""
    client = Scripted(
        lambda endpoint, _: (
            grpc.StatusCode.UNAVAILABLE if endpoint == "one" else encode_field(1, write_entry(FilerEntry("k")))
        )
    )

    assert "k" == (await client.lookup("/buckets/b", "k")).name
    assert ["one", "two"] == client.asked
    with pytest.raises(Unavailable):
        await Scripted(lambda *_: grpc.StatusCode.UNAVAILABLE).lookup("/buckets/b", "k")


CHANGES: dict[str, Callable[[FilerClient], Awaitable[Any]]] = {
    "together": lambda client: asyncio.gather(*(client.transact(GUARDED) for _ in range(3)), return_exceptions=True),
    "create": lambda client: client.create("/d", "k"),
    "delete": lambda client: client.delete("/d", "k"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_every_change_is_sent_to_another_filer_only_where_the_first_was_not_reached(change: str) -> None:
    """Sent twice, a transaction that was made would be told as refused by its condition."""
    made = joined([b"", b"", b""]) if change == "together" else b""
    late = Scripted(lambda endpoint, _: grpc.StatusCode.DEADLINE_EXCEEDED if endpoint == "one" else made)
    away = Scripted(lambda endpoint, _: grpc.StatusCode.UNAVAILABLE if endpoint == "one" else made)

    try:
        found = await CHANGES[change](late)
    except OutcomeUnknown as error:
        found = [error]
    reached = await CHANGES[change](away)

    assert {OutcomeUnknown} == {type(one) for one in found}
    assert (["one"], ["one", "two"]) == (late.asked, away.asked)
    assert reached in (None, [None, None, None])


async def test_an_entry_that_could_not_be_looked_up_is_not_an_absent_one() -> None:
    """Of lookups that travel together each has its own answer: what is absent is known to be, and only that."""
    there = encode_field(1, 1) + encode_field(2, write_entry(FilerEntry("a")))
    absent, failed = encode_field(3, b"no entry is found in store"), encode_field(3, b"disk")
    answers = [there, absent, b"", failed, there[:-1] + b"\xff"]
    client = Scripted(lambda *_: joined(answers))

    found = await asyncio.gather(*(client.lookup("/d", name) for name in "abcde"), return_exceptions=True)

    assert [FilerEntry, NotFound, NotFound, Unavailable, Corrupt] == [type(one) for one in found]
    assert ["one"] == client.asked


@pytest.mark.parametrize("first", [b"", grpc.StatusCode.UNAVAILABLE])
async def test_the_masters_say_when_each_filer_joined(first: Any) -> None:
    """Those that a filer names, where none is configured; one that leads nothing or is down is passed over."""
    node = encode_field(1, b"f:8888") + encode_field(4, 7)
    answers = {"one": joined([b"m:1.2", b"n:1.2"]), "m:2": first, "n:2": joined([node, encode_field(1, b"a:8888")])}
    client = Scripted(lambda endpoint, _: answers.get(endpoint, grpc.StatusCode.UNAVAILABLE))

    assert (("a:8888", 0), ("f:8888", 7)) == await client.started()
    assert ["one", "m:2", "n:2"] == client.asked


@pytest.mark.parametrize("masters", [b"", joined([b"m:1.2"]), joined([b"no address"]), grpc.StatusCode.UNAVAILABLE])
async def test_without_a_master_that_answers_it_is_not_known_when_filers_joined(masters: Any) -> None:
    """That is no error: what depends on it goes on without."""
    client = Scripted(lambda endpoint, _: masters if endpoint == "one" else grpc.StatusCode.UNAVAILABLE)

    assert () == await client.started()
