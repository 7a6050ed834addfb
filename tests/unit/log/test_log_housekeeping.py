"""What compactors of several processes leave to each other: cursors, tombstones and the gauges of what is gone."""

from __future__ import annotations

import asyncio
from typing import Any

from log_host import TP, Host

from lakebed.ids import Ids
from lakebed.log import paths
from lakebed.log.model import Cursor
from lakebed.log.workers import Workshop
from lakebed.log.writer import Appended
from lakebed.meta.memory import MemoryMeta
from lakebed.meta.model import Entry


async def fill(host: Host, count: int = 5) -> Any:
    broker = host.broker()
    for number in range(count):
        await host.append(broker, b"a%d" % number, b"b%d" % number)
    return broker


async def cursor(host: Host) -> int:
    found = await host.workshop().records.find(TP, paths.cursor(TP), Cursor)
    return found.value.offset if found is not None else 0


class HeldUp(MemoryMeta):
    """A compactor's meta that waits before the cursor is read for its last step."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.state, clock=host.clock, ids=Ids.seeded("held up"))
        self.last_step = False
        self.waits, self.go = asyncio.Event(), asyncio.Event()

    async def put(self, key: str, value: bytes, **options: Any) -> Entry:
        made = await super().put(key, value, **options)
        self.last_step = self.last_step or b"UPDATING_CURSOR" in value
        return made

    async def get(self, key: str, *, partition_key: str = "") -> Entry:
        if key == paths.cursor(TP) and self.last_step:
            self.waits.set()
            await self.go.wait()
        return await super().get(key, partition_key=partition_key)


async def test_a_compactor_that_is_late_does_not_move_the_cursor_back(host: Host) -> None:
    """Another finishes its compaction and makes the next one; then the late one takes its last step."""
    broker, meta = await fill(host), HeldUp(host)
    late, other = Workshop(host.context(), meta), host.workshop()
    compacting = asyncio.create_task(late.compactor.compact_once(TP))
    await meta.waits.wait()

    assert "recovered" == await other.compactor.compact_once(TP)
    for _ in range(2):
        await host.append(broker, b"x", b"y")
    assert "compacted" == await other.compactor.compact_once(TP)
    meta.go.set()

    assert "compacted" == await compacting
    assert 15 == await cursor(host)


async def test_a_tombstone_stays_while_a_slow_writer_may_be_left(host: Host) -> None:
    """Within the horizon a deleted topic that is made again gives out no offset twice."""
    broker, shop = await fill(host), host.workshop()  # the horizon is 100 s
    await broker.steward.delete("orders", reason="test")

    await host.clock.advance(99.0)
    await shop.housekeeper.keep_once(TP)
    again = await host.append(host.broker(), b"new")

    assert isinstance(again, Appended)
    assert 11 == again.start_offset


async def test_what_another_process_has_buried_is_out_of_the_gauges(host: Host) -> None:
    """The last partition goes while another process works on it: neither its lag nor its count is shown on."""
    broker, other = await fill(host), host.workshop()
    context = host.context(compact_min_entries=100)
    shop = Workshop(context, host.meta())
    await shop.schedule.pass_once()
    assert 10 == context.metrics.value("lakebed_log_compaction_lag_records")

    await broker.steward.delete("orders", reason="test")
    await host.clock.advance(200.0)
    await other.housekeeper.keep_once(TP)
    found = await shop.schedule.pass_once()

    assert {TP: "gone"} == found
    assert 0 == context.metrics.value("lakebed_log_compaction_lag_records")
    assert 0 == context.metrics.value("lakebed_log_known_partitions")


async def test_a_log_that_is_opened_again_while_its_tombstone_goes_stays(host: Host) -> None:
    """A produce comes between the last look at a tombstone and its removal: the new log is kept."""
    broker = await fill(host)
    await broker.steward.delete("orders", reason="test")
    await host.clock.advance(200.0)

    class Overtaken(MemoryMeta):
        overtaken = False

        async def delete(self, key: str, **options: Any) -> None:
            if key == paths.control(TP) and not self.overtaken:
                self.overtaken = True
                await host.append(host.broker(), b"new")
            await super().delete(key, **options)

    meta = Overtaken(host.state, clock=host.clock, ids=Ids.seeded("overtaken"))
    await Workshop(host.context(), meta).housekeeper.keep_once(TP)

    assert meta.overtaken
    assert [b"new"] == await host.read_all(host.broker())
