"""The log under crashes, faults, slow writers and clocks that differ; and the bugs that its world must catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from lakebed.log import control, paths, producers, records, simulation
from lakebed.log.broker import Broker
from lakebed.log.codec import columns
from lakebed.log.commit import Committer
from lakebed.log.compactor import Compactor
from lakebed.log.groups import Groups
from lakebed.log.model import TopicPartition
from lakebed.log.producers import RecordChunk
from lakebed.log.records import Records
from lakebed.log.services import LogServices
from lakebed.log.simulation import LogInvariants, settings
from lakebed.log.sweeper import LogSweeper
from lakebed.log.writer import Appended, PartitionAppend
from lakebed.meta.memory import MemoryState
from lakebed.meta.simulation import FaultyMeta
from lakebed.sim.commands import play
from lakebed.sim.faults import CALM
from lakebed.sim.world import InvariantBroken, Process, World
from support.seeds import seeds

SEEDS = range(40)
HUNT = 300  # seeds a bug may hide from


@pytest.mark.parametrize("seed", seeds(SEEDS, quick=range(10)))
def test_the_log_keeps_its_promises_whatever_dies(seed: int) -> None:
    """Gapless, readable, unchanging, fenced when fenced, and nothing leaked or vacuumed wrongly."""
    play("log", seed)


@pytest.mark.parametrize("seed", seeds(range(500, 510), quick=[500, 501, 502]))
@pytest.mark.parametrize("changes_max", [0, 1])
def test_the_log_keeps_its_promises_with_producers_in_snapshots(
    seed: int, changes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when nearly every stamped append writes what is known of producers beside the control record."""
    monkeypatch.setattr(producers, "CHANGES_MAX", changes_max)
    play("log", seed)


@pytest.mark.parametrize("seed", seeds(range(600, 640), quick=range(600, 606)))
def test_the_log_keeps_its_promises_while_entries_move_to_large_blobs(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a blob is large with a few records, so that entries move there one by one, whatever dies in between."""
    small = msgspec.structs.replace(simulation.SETTINGS, compact_max_bytes=100, compact_blob_bytes=300)
    monkeypatch.setattr(simulation, "SETTINGS", small)
    play("log", seed)


async def _overwrites(self: Records, tp: TopicPartition, now: Any) -> None:
    """Puts the index entry whatever is there."""
    if now.pending is not None:
        await self.meta.put(
            paths.index(tp, now.pending.end_offset),
            msgspec.json.encode(now.pending.entry()),
            partition_key=tp.partition_key,
        )


def _skips_index(*_: Any) -> None:
    """The next append takes the place of a pending one that is in no index."""


async def _never_landed(self: Committer, *_: Any) -> None:
    """A lost answer counts as a failure."""


async def _unannounced(self: LogSweeper, tp: TopicPartition, before_ms: int) -> Any:
    """The vacuum looks without reporting writers that it has."""
    return await self._look(tp)


async def _deletes_first(self: Compactor, tp: TopicPartition, record: Any) -> bool:
    """Deletes the old entries before the compacted one exists."""
    await self._records.meta.delete_range(
        paths.index(tp, record.value.start_offset), paths.index(tp, record.value.end_offset)
    )
    return await _finish(self, tp, record)


_finish = Compactor._finish


def _forgets(*_: Any, **__: Any) -> None:
    """Anyone who is not known is taken for new."""


async def _believes(self: Groups, group: str, tp: TopicPartition, offset: int, **options: Any) -> Any:
    """The last commit wins, no matter who makes it."""
    return await _commit(self, group, tp, offset, seek=True, note=options.get("note", ""))


_commit = Groups.commit


def _ignores_fence(now: Any, tp: TopicPartition) -> None:
    """Appends are taken whatever the state."""


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (Records, "materialise", _overwrites),
        (records, "_indexed", _skips_index),
        (Committer, "_landed", _never_landed),
        (LogSweeper, "_announce", _unannounced),
        (Compactor, "_finish", _deletes_first),
        (control, "demand_open", _ignores_fence),
        (producers, "_refuse_unknown", _forgets),
        (Groups, "commit", _believes),
    ],
)
def test_the_world_catches_what_it_is_there_to_catch(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, bug: Callable[..., Any]
) -> None:
    """Each of these bugs breaks an invariant within a few hundred seeds."""
    monkeypatch.setattr(owner, name, bug)

    with pytest.raises(InvariantBroken):
        for seed in range(HUNT):
            play("log", seed)


AWAITS = 90  # more than the script below makes


@pytest.mark.parametrize("at", seeds(range(1, AWAITS), quick=range(1, AWAITS, 4)))
def test_a_process_that_dies_at_any_await_loses_nothing(at: int) -> None:
    """Appends, compaction, trim and vacuum in one process that is killed at its nth await; another one continues."""
    tp, state, acknowledged = TopicPartition("t", 0), MemoryState(), []

    async def script(world: World) -> None:
        watch = LogInvariants(world, state, [tp])

        async def life(process: Process) -> None:
            meta = FaultyMeta(process, state)
            broker, services = Broker(process.context(settings()), meta), LogServices(process.context(settings()), meta)
            for number in range(4):
                record = f"{process.node}-{number}".encode()
                ((outcome,),) = await broker.writer.append_shared(
                    [PartitionAppend(tp, (RecordChunk(columns([record])),))]
                )
                assert isinstance(outcome, Appended)
                acknowledged.append((outcome.start_offset, record))
                await broker.writer.drain()
            await services.compactor.compact_once(tp)
            await services.sweeper.sweep_once()
            await broker.admin.trim(tp, 2)
            await services.retention.apply_once(tp)

        mortal = world.process("p", crash_at_await=at)
        await mortal.spawn(life(mortal))
        successor = world.process("heir")
        await successor.spawn(life(successor))
        watch.complaint()
        for offset, record in acknowledged:
            world.check(watch.truth[tp].get(offset) == record, f"{record!r} is not at {offset}")

    World(at, faults=CALM).run(script)

    assert len(acknowledged) >= 4
