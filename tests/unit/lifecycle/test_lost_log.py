"""How far back the filer's log reaches, and how a stream of it goes on where it broke."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import NotFound, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.filer.client import FilerClient
from lakebed.filer.model import Attributes, FilerEntry, FilerEvent
from lakebed.lifecycle.model import Position
from lakebed.lifecycle.seaweed.entries import ORDER_NS
from lakebed.lifecycle.seaweed.store import SeaweedLake

SECOND_NS = 1_000_000_000
MADE_NS = 1_794_780_615 * SECOND_NS  # 2026-11-15 22:10:15
FIRST_NS = 1_794_780_540 * SECOND_NS  # 22:09
LATER_NS = FIRST_NS + 180 * SECOND_NS


class LogFiler(FilerClient):
    """A filer with nothing but a log: its files by day, and the changes it tells (None: the stream breaks)."""

    def __init__(self, files: dict[str, list[str]] | None, changes: Sequence[FilerEvent | None] = ()) -> None:
        super().__init__(["nowhere:0"], Runtime(clock=ManualClock(), ids=Ids.seeded(1), metrics=Metrics()))
        self._files, self._changes, self.since_ns = files, list(changes), [0]

    async def lookup(self, directory: str, name: str) -> FilerEntry:
        if self._files is None:
            raise NotFound("no log yet")
        return FilerEntry(name, True, Attributes(crtime_ns=MADE_NS))

    async def started(self) -> tuple[tuple[str, int], ...]:
        return (("f1:8888", 7),)

    async def page(
        self, directory: str, *, prefix: str = "", after: str = "", inclusive: bool = False, limit: int = 10
    ) -> list[FilerEntry]:
        files = self._files or {}
        day = directory.rpartition("/")[2]
        return [FilerEntry(name) for name in sorted(files.get(day, files if day == "log" else [])) if name > after][
            :limit
        ]

    async def subscribe(
        self, prefixes: Sequence[str], *, since_ns: int, until_ns: int = 0, tick_s: float = 0.0
    ) -> AsyncGenerator[FilerEvent, None]:
        self.since_ns.append(since_ns)
        while self._changes:
            change = self._changes.pop(0)
            if change is None:
                raise Unavailable("it broke")
            yield change


def lake(filer: FilerClient) -> SeaweedLake:
    return SeaweedLake(filer, Runtime(clock=ManualClock(), ids=Ids.seeded(1), metrics=Metrics()))


async def read(filer: FilerClient, after: Position) -> list[Position]:
    return [event.position async for event in lake(filer).read(after, 2**62)]


@pytest.mark.parametrize(
    ("files", "first_ns", "begins_ns"),
    [
        (None, None, 0),
        ({}, None, 0),
        ({"2026-11-15": ["22-09.a", "22-10.a"]}, FIRST_NS, 0),
        ({"2026-11-14": [], "2026-11-15": ["22-09.a"]}, FIRST_NS, 0),
        (
            {"2026-11-15": ["00-notes.txt", "22-12.a", "22-13.a"]},
            FIRST_NS + 180 * SECOND_NS,
            FIRST_NS + 180 * SECOND_NS,
        ),
    ],
)
async def test_the_reach_of_a_log_is_its_folder_and_its_first_file(
    files: dict[str, list[str]] | None, first_ns: int | None, begins_ns: int
) -> None:
    """A first file of a later minute than the folder shows that earlier ones are gone; a foreign file is passed by."""
    found = await lake(LogFiler(files)).reach()

    assert (MADE_NS if files is not None else 0, first_ns, begins_ns) == (
        found.made_ns,
        found.first_ns,
        found.begins_ns,
    )
    assert (("f1:8888", 7),) == found.servers


async def test_a_broken_stream_goes_on_where_it_broke() -> None:
    """Changes of one instant are numbered alike each time, so none is told twice and none is left out."""
    made = [FilerEvent("/buckets/b", 5, new=FilerEntry(name)) for name in ("k", "l")]
    later = FilerEvent("/buckets/b", 6, new=FilerEntry("m"))
    filer = LogFiler(None, [made[0], None, *made, later])

    assert [Position(5, 0), Position(5, 1), Position(6, 0)] == await read(filer, Position(3, 9))
    assert [2, 2] == filer.since_ns[1:]  # what was held for its order is read again


async def test_changes_that_are_out_of_order_in_the_log_are_given_in_order() -> None:
    """A cursor that passed later ones would pass them: with many writers, a change gets its time before its place."""
    times_s = [1, 3, 2, 9, 4, 20, 16, 21]
    made = [FilerEvent("/buckets/b", at * SECOND_NS, new=FilerEntry(f"k{at}")) for at in times_s]

    events = [event async for event in lake(LogFiler(None, made)).read(Position(), 19 * SECOND_NS)]

    assert [f"k{at}" for at in (1, 2, 3, 4, 9, 16)] == [event.key for event in events]
    assert sorted(event.position for event in events) == [event.position for event in events]


async def test_the_log_is_read_further_than_asked_for_but_not_into_the_future() -> None:
    """A change before the end may have its place behind it."""
    asked: list[int] = []

    class Noted(LogFiler):
        def subscribe(self, prefixes: Sequence[str], **said: Any) -> Any:
            asked.append(said["until_ns"])
            return super().subscribe(prefixes, **said)

    noted = lake(Noted(None, []))
    now_ns = noted._clock.now_ns()
    for until_ns in (now_ns - 100 * SECOND_NS, now_ns - SECOND_NS, now_ns + SECOND_NS):
        assert [] == [event async for event in noted.read(Position(), until_ns)]

    assert [now_ns - 100 * SECOND_NS + ORDER_NS, now_ns, now_ns + SECOND_NS] == asked


async def test_a_stream_that_always_breaks_is_unavailable() -> None:
    """After a bounded number of tries."""
    filer = LogFiler(None, [None] * 50)

    with pytest.raises(Unavailable):
        await read(filer, Position())
    assert 4 == len(filer.since_ns)
