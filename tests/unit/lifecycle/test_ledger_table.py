"""The ledger's move into its table: every row once, wherever it is, whatever dies on the way."""

from __future__ import annotations

from typing import Any

import pytest

from lakebed.core.errors import Corrupt, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.lifecycle import ledger, paths
from lakebed.lifecycle.ledger import DeletionLedger, LedgerMover, LedgerTable
from lakebed.lifecycle.state import Fold
from lakebed.store.memory import MemoryStore
from lakebed.store.runtime import StoreRuntime
from support.lifecycle_harness import Harness
from support.lifecycle_makers import rule


async def lived(count: int = 3) -> Harness:
    """A worker that expired so many objects of each of two buckets."""
    world = Harness()
    for bucket in ("b", "c"):
        await world.policy(bucket, rule(rule_id="r", expiration_days=1))
        for number in range(count):
            world.lake.write(bucket, f"k{number}")
    await world.run_round(1.01)
    return world


async def segments(world: Harness) -> list[str]:
    return [info.key for b in "bc" async for info in world.store.list(paths.ledger_folder(b))]


async def test_rows_are_the_same_before_and_after_they_were_moved() -> None:
    """All fields, by bucket and by key; intents stay intents."""
    world = await lived()
    before = {b: await world.ledger(b) for b in "bc"}
    one = await world.ledger("b", "k1")

    assert 4 == await LedgerMover(world.registers).run()

    assert [] == await segments(world)
    for bucket, rows in before.items():
        assert sorted(rows, key=str) == sorted(await world.ledger(bucket), key=str)
    assert one == await world.ledger("b", "k1")
    assert ["", "DELETED"] == [row.outcome for row in one]
    assert 0 == await LedgerMover(world.registers).run()


async def test_rows_that_are_moved_while_they_are_read_are_told_once() -> None:
    """The segment was listed and is gone when it is read: its rows are in the table by then."""
    world = await lived()
    before = await world.ledger("b")

    class Moving:
        moved = False

        def __getattr__(self, name: str) -> Any:
            return getattr(world.store, name)

        async def get(self, key: str) -> Any:
            if not self.moved and key.startswith(paths.ledger_folder("b")):
                self.moved = True
                await LedgerMover(world.registers).run()
            return await world.store.get(key)

    store: Any = Moving()
    found = [row async for row in DeletionLedger(world.registers.runtime.on(store)).rows("b")]

    assert store.moved
    assert sorted(before, key=str) == sorted(found, key=str)


async def test_rows_from_an_instant_on_begin_with_that_instant() -> None:
    """The same from segments and from the table: a reader that goes on where it ended misses nothing."""
    world = await lived(1)
    last_ns = max(row.at_ns for row in await world.ledger("b"))

    async def since() -> list[str]:
        ledger = DeletionLedger(StoreRuntime(clock=world.clock, ids=Ids(), metrics=Metrics(), store=world.store))
        return [row.outcome async for row in ledger.rows("b", after_ns=last_ns)]

    before = await since()
    await LedgerMover(world.registers).run()

    assert "DELETED" in before
    assert sorted(before) == sorted(await since())


async def test_new_rows_join_the_moved_ones_and_small_files_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking about a key finds its whole past; files do not pile up."""
    monkeypatch.setattr(ledger, "FILES_MAX", 3)
    world = await lived(1)
    for _ in range(5):
        await LedgerMover(world.registers).run()
        world.lake.write("b", "k0")
        await world.run_round(1.01)

    told = [row.outcome for row in await world.ledger("b", "k0")]
    table = LedgerTable(StoreRuntime(clock=world.clock, ids=Ids(), metrics=Metrics(), store=world.store))

    assert ["", "DELETED"] * 6 == told
    assert 3 >= len((await table._table.snapshot()).files)


async def test_files_that_were_put_together_are_swept_when_nobody_can_need_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A week after, as for every table; rows are untouched."""
    monkeypatch.setattr(ledger, "FILES_MAX", 1)
    monkeypatch.setattr(ledger, "SWEEP_EVERY", 1)
    world = await lived(1)
    for _ in range(3):
        await LedgerMover(world.registers).run()
        world.lake.write("b", "k0")
        await world.run_round(1.01)
    before = await world.ledger("b", "k0")
    await world.clock.advance(8 * 86_400.0)
    await LedgerMover(world.registers).run()
    await world.clock.advance(8 * 86_400.0)
    world.lake.write("b", "k0")
    await world.run_round(1.01)
    await LedgerMover(world.registers).run()

    files = [info.key async for info in world.store.list("tables/lifecycle/ledger/") if info.key.endswith(".parquet")]
    assert len(files) <= 2
    assert before == (await world.ledger("b", "k0"))[: len(before)]


class Dying(MemoryStore):
    """Fails at its k-th change."""

    def arm(self, at: int) -> None:
        self.left = at

    def _step(self) -> None:
        self.left = getattr(self, "left", 1 << 30) - 1
        if self.left == 0:
            raise Unavailable("died here")

    async def create(self, key: str, data: bytes) -> object:  # type: ignore[override]
        self._step()
        return await super().create(key, data)

    async def replace(self, key: str, data: bytes, etag: str) -> object:  # type: ignore[override]
        self._step()
        return await super().replace(key, data, etag)

    async def delete(self, key: str) -> None:
        self._step()
        await super().delete(key)


async def test_a_move_may_die_at_every_change_and_every_row_is_there_once() -> None:
    """Before the plan, the file, the commit, each delete, the end: the next move finishes it."""
    deaths = 0
    for at in range(1, 20):
        world = await lived(2)
        dying = Dying(clock=world.clock)
        for key in [info.key for b in "bc" async for info in world.store.list(paths.ledger_folder(b))]:
            await dying.create(key, (await world.store.get(key)).data)
        world.store = dying
        world.registers = type(world.registers)(
            StoreRuntime(clock=world.clock, ids=Ids(), metrics=world.metrics, store=dying)
        )
        whole = sorted(await world.ledger("b"), key=str)
        dying.arm(at)
        try:
            await LedgerMover(world.registers).run()
        except Unavailable:
            deaths += 1
            assert whole == sorted(await world.ledger("b"), key=str)
            await LedgerMover(world.registers).run()
        assert whole == sorted(await world.ledger("b"), key=str)
        assert () == (await world.registers.fold.read()).value.segments

    assert 8 <= deaths < 19


async def test_a_plan_that_was_committed_is_not_committed_again() -> None:
    """Its segments, met again after a crash, are only deleted."""
    world = await lived()
    names = tuple(await segments(world))
    kept = {name: (await world.store.get(name)).data for name in names}
    await LedgerMover(world.registers).run()
    whole = sorted(await world.ledger("b"), key=str)
    for name, data in kept.items():
        await world.store.create(name, data)
    await world.registers.fold.change(lambda known: (Fold(number=known.number, segments=names), None))

    assert whole == sorted(await world.ledger("b"), key=str)
    await LedgerMover(world.registers).run()

    assert whole == sorted(await world.ledger("b"), key=str)


async def test_a_move_that_ends_late_leaves_the_plan_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mover that another overtook closes its own plan alone, so no row is moved twice."""
    world = await lived()
    overtaking = Fold(number=2, segments=("one", "two"))
    delete = world.store.delete

    async def overtaken(key: str) -> None:
        await delete(key)
        await world.registers.fold.change(lambda _: (overtaking, None))

    monkeypatch.setattr(world.store, "delete", overtaken)
    await LedgerMover(world.registers).run()

    assert overtaking == (await world.registers.fold.read()).value


async def test_a_damaged_segment_is_named_and_stops_only_the_move() -> None:
    """The worker goes on; the segment stays where an operator finds it."""
    world = await lived()
    await world.store.create(paths.ledger_segment("b", 1, "x"), b"{}\nno\n")

    with pytest.raises(Corrupt, match=r"ledger/b/0+1-x"):
        await LedgerMover(world.registers).run()
    world.lake.write("b", "later")
    await world.run_round(10)

    assert [] == world.left()


async def test_a_move_that_was_full_is_followed_by_the_next_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At one full move in `fold_s` a fast worker's segments would grow without end, and its events come ever later."""
    monkeypatch.setattr(ledger, "SEGMENTS_MAX", 2)
    world = Harness(fold_s=1000.0)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    for number in range(3):
        world.lake.write("b", f"k{number}")
        await world.run_round(1.01)
    left = [len(await segments(world))]
    await world.clock.advance(700.0)
    for _ in range(4):
        await world.run_round()
        left.append(len(await segments(world)))

    assert [6, 4, 2, 0, 0] == left


async def test_the_worker_moves_the_ledger_by_itself() -> None:
    """After the time that `fold_s` says."""
    world = Harness(fold_s=50.0)
    await world.policy("b", rule(expiration_days=1))
    world.lake.write("b", "a")
    await world.run_round(1.01)
    await world.run_round(0.6)

    assert [] == await segments(world)
    assert ["", "DELETED"] == [row.outcome for row in await world.ledger()]
