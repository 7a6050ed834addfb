"""One contract for every audit table of ticks: one row for a tick, created if absent, changed if known, expiring."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import SystemClock, now_ms
from lakebed.core.ids import Ids
from lakebed.store.memory import MemoryStore
from lakebed.store.protocol import Store
from lakebed.ticks.adapters import open_audit
from lakebed.ticks.audit import LOG, AuditRow, AuditTable
from lakebed.ticks.model import TickId
from support.aws_servers import aws_server
from support.tick_fixtures import context_of

KINDS = ("memory", "bucket", "ministack", "moto")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    if request.param in ("memory", "bucket"):
        yield request.param, ""
        return
    with aws_server(request.param) as url:
        yield request.param, url


@pytest.fixture
def table(kind: tuple[str, str], request: pytest.FixtureRequest) -> AuditTable:
    name, url = kind
    more: dict[str, Any] = {}
    store: Store = MemoryStore(clock=SystemClock())
    if name == "bucket":
        store = request.getfixturevalue("bucket")
    if url:
        more = {
            "audit": "dynamodb", "aws_endpoint": url, "dynamodb_prefix": f"t{Ids().token()}-",
            "aws_access_key_id": "test", "aws_secret_access_key": "test",
        }  # fmt: skip
    return open_audit(context_of(store, **more), "silver_dispatched")


def row(tick: str = "t1", *, org: str = "o", state: str = "running", lives_s: int = 60) -> AuditRow:
    now = now_ms(SystemClock())
    return AuditRow(org, "p", tick, state, Ids().token(), now, now // 1000 + lives_s, {"tries": 1, "by": "node é"})


async def test_a_row_is_created_once_and_read_back(table: AuditTable) -> None:
    """The first writer wins; what it wrote remains."""
    first, second = row(), row()

    created, refused = await table.create(first), await table.create(second)

    assert (True, False) == (created, refused)
    assert first == await table.get(first.tick)


# moto checks the condition and then puts, in two steps and in many threads: two of eight can win there.
@pytest.mark.parametrize("kind", [each for each in KINDS if each != "moto"], indirect=True)
async def test_of_many_creating_at_once_one_wins(table: AuditTable) -> None:
    """The conditional put has exactly one winner."""
    rows = [row() for _ in range(8)]

    won = await asyncio.gather(*(table.create(each) for each in rows))

    assert 1 == sum(won)
    assert rows[won.index(True)] == await table.get(rows[0].tick)


async def test_writing_the_same_row_again_is_no_refusal(table: AuditTable) -> None:
    """A writer whose answer was lost queries again, and it is still its own row."""
    mine = row()

    assert (True, True) == (await table.create(mine), await table.create(mine))


async def test_a_row_is_changed_only_by_who_knows_it(table: AuditTable) -> None:
    """A change names what it replaces; a stale one, and one of a missing row, are refused."""
    first = row()
    second, third = row(state="failed"), row(state="done")
    await table.create(first)

    changed, stale = await table.change(second, first), await table.change(third, first)
    missing = await table.change(row("t9"), row("t9"))

    assert (True, False, False) == (changed, stale, missing)
    assert second == await table.get(first.tick)


async def test_orgs_do_not_meet_in_one_tick_id(table: AuditTable) -> None:
    """The same id in two orgs is two rows."""
    mine, theirs = row(), row(org="rival")

    assert (True, True) == (await table.create(mine), await table.create(theirs))
    assert theirs == await table.get(TickId("rival", "p", "t1"))


async def test_a_cleared_row_can_be_created_again(table: AuditTable) -> None:
    """A replay clears first; clearing twice is fine."""
    first = row()
    await table.create(first)

    await table.clear(first.tick)
    await table.clear(first.tick)

    assert None is await table.get(first.tick)
    assert await table.create(row())


async def test_a_row_whose_time_is_over_is_not_there(table: AuditTable) -> None:
    """It is not read, not listed, and blocks nobody, whether or not it is swept yet."""
    old, new = row(lives_s=-1), row()
    await table.create(old)

    gone = await table.get(old.tick)
    listed = [each async for each in table.rows()]
    created = await table.create(new)

    assert (None, [], True) == (gone, listed, created)
    assert new == await table.get(new.tick)


async def test_all_rows_are_listed(table: AuditTable) -> None:
    """Each once, whole."""
    rows = [row(f"t{n}") for n in range(12)]
    await asyncio.gather(*(table.create(each) for each in rows))

    listed = [each async for each in table.rows()]
    ticks = [each async for each in table.ticks()]

    assert sorted(map(msgspec.json.encode, rows)) == sorted(map(msgspec.json.encode, listed))
    assert sorted(each.tick for each in rows) == sorted(ticks)


async def test_all_rows_are_listed_when_they_are_large(table: AuditTable) -> None:
    """Rows have the log of their job: together more than the 1 MB that DynamoDB gives at once."""
    rows = [
        msgspec.structs.replace(row(f"t{n}"), fields={"tries": 1, LOG: f"{n} ".ljust(150_000, "x")}) for n in range(9)
    ]
    for each in rows:
        await table.create(each)

    listed = [each async for each in table.rows()]
    ticks = [each async for each in table.ticks()]

    assert [each.tick for each in rows] == sorted(each.tick for each in listed) == sorted(ticks)
    assert sorted(map(msgspec.json.encode, rows)) == sorted(map(msgspec.json.encode, listed))


async def test_a_sweep_leaves_what_lives(table: AuditTable) -> None:
    """Only rows whose time is over go."""
    alive, over = row("t1"), row("t2", lives_s=-1)
    await table.create(alive)
    await table.create(over)

    await table.sweep()

    assert [alive] == [each async for each in table.rows()]
