"""Requests that are made at the same time are one call; each gets its own answer, or its own error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lakebed.core.errors import NotFound, OutcomeUnknown, Stale, Unavailable
from lakebed.filer.batching import RequestBatcher
from lakebed.filer.codec import write_entry
from lakebed.filer.model import FilerEntry
from lakebed.filer.protobuf import encode_field
from support.scripted_filer import GUARDED, Scripted
from support.wire import fields


class Sender:
    """Doubles numbers; notes the batches, and waits for `gate` before it answers."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, numbers: Sequence[int]) -> Sequence[int | Exception]:
        self.batches.append(list(numbers))
        await self.gate.wait()
        if 13 in numbers:
            raise Unavailable("no")
        return [2 * number if number else NotFound("zero") for number in numbers]


async def test_one_request_is_sent_at_once_and_many_together_within_the_bounds() -> None:
    """At most so many in a call, at most so many calls under way; what waits goes with the next."""
    sender = Sender()
    batcher = RequestBatcher(sender, most=3, calls_max=2)
    assert 2 == await batcher.ask(1)

    sender.gate.clear()
    asked = [asyncio.create_task(batcher.ask(number)) for number in range(1, 11)]
    for _ in range(10):
        await asyncio.sleep(0)
    under_way = sender.batches[1:]
    sender.gate.set()

    assert [2 * number for number in range(1, 11)] == await asyncio.gather(*asked)
    assert [[1, 2, 3], [4, 5, 6]] == under_way
    assert [[1], [1, 2, 3], [4, 5, 6], [7, 8, 9], [10]] == sender.batches


async def test_an_error_of_one_is_its_own_and_an_error_of_the_call_is_everybodys() -> None:
    """And afterwards the batcher works on."""
    batcher = RequestBatcher(Sender(), most=10, calls_max=1)

    first = await asyncio.gather(*(batcher.ask(number) for number in (1, 0, 2)), return_exceptions=True)
    second = await asyncio.gather(*(batcher.ask(number) for number in (1, 13)), return_exceptions=True)

    assert [2, NotFound, 4] == [one if isinstance(one, int) else type(one) for one in first]
    assert [Unavailable, Unavailable] == [type(one) for one in second]
    assert 8 == await batcher.ask(4)


async def test_who_gives_up_before_the_call_is_left_out_of_it() -> None:
    """A change that nobody waits for any more is not made."""
    sender = Sender()
    sender.gate.clear()
    batcher = RequestBatcher(sender, most=10, calls_max=1)
    first = asyncio.create_task(batcher.ask(1))
    await asyncio.sleep(0.001)
    second, third = asyncio.create_task(batcher.ask(2)), asyncio.create_task(batcher.ask(3))
    await asyncio.sleep(0.001)
    second.cancel()
    await asyncio.sleep(0.001)
    sender.gate.set()

    assert [2, 6] == [await first, await third]
    assert [[1], [3]] == sender.batches


async def test_lookups_and_transactions_of_one_instant_are_one_request_each() -> None:
    """Each lookup is answered, or NotFound; each transaction is judged on its own."""

    def answer(_: str, request: bytes) -> bytes:
        wanted = [bytes(value) for number, value in fields(request) if number == 1]  # type: ignore[arg-type]
        if dict(fields(wanted[0])).get(2) in (b"a", b"gone"):  # lookups: the name
            names = [bytes(dict(fields(one))[2]).decode() for one in wanted]  # type: ignore[arg-type]
            return b"".join(
                encode_field(1, b"" if name == "gone" else encode_field(1, 1) + encode_field(2, entry(name)))
                for name in names
            )
        return encode_field(1, b"") + encode_field(1, encode_field(1, b"no") + encode_field(2, 6))

    def entry(name: str) -> bytes:
        return write_entry(FilerEntry(name))

    client = Scripted(answer)
    found = await asyncio.gather(*(client.lookup("/d", name) for name in ("a", "gone", "b")), return_exceptions=True)
    done = await asyncio.gather(*(client.transact(GUARDED) for _ in range(3)), return_exceptions=True)

    assert ["a", NotFound, "b"] == [one.name if isinstance(one, FilerEntry) else type(one) for one in found]
    assert [type(None), Stale, OutcomeUnknown] == [type(one) for one in done]  # the third has no answer
    assert 2 == len(client.asked)


async def test_a_folder_is_read_by_pages_and_young_files_are_only_counted() -> None:
    """Folders are always read; a message without an entry is none."""
    names = [f"{number:04d}" for number in range(2500)]

    def page(_: str, request: bytes) -> list[bytes]:
        said = dict(fields(request))
        after = bytes(said.get(3, b"")).decode()  # type: ignore[arg-type]
        inside = [name for name in names if name > after][: int(said[5])]  # type: ignore[arg-type]
        found = [encode_field(1, entry_at(name)) for name in inside]
        return found if after else [encode_field(2, 7), *found[:-1]]

    def entry_at(name: str) -> bytes:
        young, folder = name >= "0002", name == "0005"
        seen = encode_field(2, 100 if young else 1)
        return encode_field(1, name.encode()) + (encode_field(2, 1) if folder else b"") + encode_field(4, seen)

    found = [one async for some in Scripted(page).pages("/d", newest_ns=50 * 10**9) for one in some]
    read = [one.name for one in found if isinstance(one, FilerEntry)]
    skipped = [(one.name, one.count) for one in found if not isinstance(one, FilerEntry)]

    assert ["0000", "0001", "0005"] == read
    assert ("0004", 3) == skipped[0] and 2500 == len(read) + sum(count for _, count in skipped)
