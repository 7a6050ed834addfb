"""Vacuum: only what no kept version refers to goes, and only when it is old."""

from __future__ import annotations

import msgspec
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Invalid
from lakebed.delta.log import Commit, encode, log_key
from lakebed.delta.model import DataFile, TableSpec
from lakebed.delta.vacuum import sweep, sweepable
from lakebed.store.memory import MemoryStore

SCHEMA = '{"type":"struct","fields":[{"name":"id","type":"long","nullable":true,"metadata":{}}]}'
SPEC = TableSpec("bronze/t", SCHEMA)
DAY_S = 86_400.0


class World:
    """A table that is written to day by day."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.store, self.version = clock, MemoryStore(clock=clock), -1

    async def put(self, name: str) -> DataFile:
        await self.store.create(f"{SPEC.root}/{name}.parquet", name.encode())
        return DataFile(f"{name}.parquet", len(name), 1)

    async def commit(self, adds: tuple[DataFile, ...], removes: tuple[DataFile, ...] = ()) -> None:
        self.version += 1
        commit = Commit("WRITE", adds, removes, spec=SPEC if self.version == 0 else None, table_id="i")
        await self.store.create(log_key(SPEC.root, self.version), encode(commit, attempt_id="a", now_ms=0))

    async def left(self) -> list[str]:
        infos = [info.key async for info in self.store.list(f"{SPEC.root}/")]
        return sorted(key.rsplit("/", 1)[-1].removesuffix(".parquet") for key in infos if key.endswith(".parquet"))


async def test_what_left_the_table_is_kept_as_long_as_its_versions_may_be_read(manual_clock: ManualClock) -> None:
    """A replaced file goes once the version that replaced it is older than the kept time; current files stay."""
    world = World(manual_clock)
    old = await world.put("old")
    await world.commit((old,))
    await manual_clock.advance(10 * DAY_S)
    new = await world.put("new")
    await world.commit((new,), (old,))

    soon = await sweep(world.store, SPEC.root, clock=manual_clock, keep_s=3 * DAY_S)
    await manual_clock.advance(4 * DAY_S)
    later = await sweep(world.store, SPEC.root, clock=manual_clock, keep_s=3 * DAY_S)

    assert (0, 1) == (soon, later)
    assert ["new"] == await world.left()


async def test_orphans_go_when_they_are_old_and_fresh_ones_stay(manual_clock: ManualClock) -> None:
    """A job that is still writing loses nothing."""
    world = World(manual_clock)
    await world.commit((await world.put("held"),))
    await world.put("orphan")
    await manual_clock.advance(2 * DAY_S)
    await world.put("writing")

    found = await sweepable(world.store, SPEC.root, clock=manual_clock, keep_s=DAY_S)

    assert [f"{SPEC.root}/orphan.parquet"] == [info.key for info in found]
    assert ["held", "orphan", "writing"] == await world.left()


async def test_a_kept_time_that_endangers_writers_is_refused(manual_clock: ManualClock) -> None:
    """Nobody sweeps the last minutes."""
    with pytest.raises(Invalid):
        await sweepable(World(manual_clock).store, SPEC.root, clock=manual_clock, keep_s=60.0)


async def test_joined_files_of_a_version_that_is_kept_stay(manual_clock: ManualClock) -> None:
    """Written just before the kept time and committed just after: a version without new rows needs its files too."""
    world = World(manual_clock)
    old = await world.put("old")
    await world.commit((old,))
    joined = await world.put("joined")
    await manual_clock.advance(60.0)
    commit = Commit("OPTIMIZE", (joined,), (old,), data_change=False)
    await world.store.create(log_key(SPEC.root, 1), encode(commit, attempt_id="a", now_ms=0))
    await manual_clock.advance(7 * DAY_S - 30.0)

    assert [] == await sweepable(world.store, SPEC.root, clock=manual_clock)


async def test_change_files_of_a_version_that_is_kept_stay(manual_clock: ManualClock) -> None:
    """Another engine wrote its change file before the kept time and committed it after: the feed needs it."""
    world = World(manual_clock)
    await world.commit((await world.put("held"),))
    await world.put("_change_data/cdc")
    await world.put("_change_data/orphan")
    await manual_clock.advance(60.0)
    action = {"cdc": {"path": "_change_data/cdc.parquet", "partitionValues": {}, "size": 1, "dataChange": False}}
    await world.store.create(log_key(SPEC.root, 1), msgspec.json.encode(action))
    await manual_clock.advance(7 * DAY_S - 30.0)

    found = await sweepable(world.store, SPEC.root, clock=manual_clock)

    assert [f"{SPEC.root}/_change_data/orphan.parquet"] == [info.key for info in found]
