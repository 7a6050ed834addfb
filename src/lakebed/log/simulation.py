"""Simulation of the log: brokers, compactors, a sweeper and an operator on a few partitions; every process crashes.

After every step, every committed record must be readable where it was acknowledged, with its bytes: the index, the
control record and the bucket together must always resolve each offset to the same record. A group's offset never
goes back, and is only committed by the member that claimed it last.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable

import msgspec

from lakebed.core.errors import Conflict, Fenced, OutcomeUnknown, Overloaded, Unavailable
from lakebed.core.settings import Settings
from lakebed.log import codec, paths
from lakebed.log.broker import Broker
from lakebed.log.codec import Records, as_batches, columns
from lakebed.log.groups import NO_OFFSET
from lakebed.log.model import (
    Control,
    GroupOffset,
    IndexEntry,
    IndexSpan,
    OffsetOutOfRange,
    TopicPartition,
    UnknownTopicPartition,
)
from lakebed.log.producers import RecordChunk, Stamp
from lakebed.log.reader import chain_spans
from lakebed.log.services import LogServices
from lakebed.log.settings import LogSettings
from lakebed.log.writer import Appended
from lakebed.meta.memory import MemoryState
from lakebed.meta.model import prefix_end
from lakebed.meta.simulation import FaultyMeta
from lakebed.sim.faults import CALM
from lakebed.sim.history import History
from lakebed.sim.world import Process, World

CRASH = 0.002
HORIZON_S = 1.5  # short: the sweeper sometimes overtakes a slow writer
SKEW_S = 0.5
MEMORY_S = 1.0  # short: a producer that retries is sometimes forgotten meanwhile
GROUP = "g"
SETTINGS = LogSettings(
    batch_max_delay_ms=5.0,
    flights_max=2,
    poll_s=0.1,
    compact_min_entries=2,
    compact_max_entries=6,
    compact_fan_in=2,
    claim_s=3.0,
    vacuum_horizon_s=HORIZON_S,
    producer_memory_s=MEMORY_S,
)


class LogInvariants:
    """Remembers the record of each offset when it is committed, and checks after each step that it is unchanged."""

    def __init__(self, world: World, state: MemoryState, tps: list[TopicPartition]) -> None:
        self.history = History()
        self.truth: dict[TopicPartition, dict[int, bytes]] = {tp: {} for tp in tps}
        self._world, self._state, self._tps = world, state, tps
        self._uris = paths.uris("s3://lakebed")
        self._seen: tuple[int, int] = (-1, -1)
        self._controls: dict[TopicPartition, Control] = {}
        self._batches: dict[tuple[str, int], codec.RecordBatch] = {}
        self._groups: dict[TopicPartition, GroupOffset] = {}
        world.invariant("log", self.complaint)

    def complaint(self) -> str | None:
        at = (self._state.version + len(self._state.keys) * 1_000_003, len(self._world.bucket.objects))
        if at == self._seen:
            return None
        self._seen = at
        for tp in self._tps:
            wrong = self._partition(tp)
            if wrong:
                return f"{tp}: {wrong}"
        return None

    def control(self, tp: TopicPartition) -> Control | None:
        entry = self._state.entries.get(paths.control(tp))
        return msgspec.json.decode(entry.value, type=Control) if entry is not None else None

    def spans(self, tp: TopicPartition) -> list[IndexSpan]:
        folder = paths.index_folder(tp)
        found: list[IndexSpan] = []
        for key in self._state.between(folder, prefix_end(folder)):
            entry = msgspec.json.decode(self._state.entries[key].value, type=IndexEntry)
            end = paths.index_offset(key)
            found.append(IndexSpan(end - entry.msg_count + 1, end, entry))
        return found

    def _partition(self, tp: TopicPartition) -> str | None:
        now = self.control(tp)
        if now is None:
            return None
        wrong = self._group(tp)
        if wrong:
            return wrong
        before = self._controls.get(tp)
        self._controls[tp] = now
        if before is not None and now.sequence_counter < before.sequence_counter:
            return "the sequence counter went back"
        if before is not None and now.log_start_offset < before.log_start_offset:
            return "the start of the log went back"
        closed = before is not None and before.log_state == now.log_state != "OPEN"
        if before is not None and closed and now.sequence_counter != before.sequence_counter:
            return f"an append was taken while {now.log_state}"
        return self._readable(tp, now)

    def _group(self, tp: TopicPartition) -> str | None:
        entry = self._state.entries.get(paths.group_offset(tp, GROUP))
        if entry is None:
            return None
        now, before = msgspec.json.decode(entry.value, type=GroupOffset), self._groups.get(tp, NO_OFFSET)
        self._groups[tp] = now
        if now.offset < before.offset or now.generation < before.generation:
            return f"the group went back from {before} to {now}"
        if now.offset > before.offset and now.note and now.note != str(now.generation):
            return f"generation {now.note} committed {now.offset} in generation {now.generation}"
        return None

    def _readable(self, tp: TopicPartition, now: Control) -> str | None:
        """Reads the whole log as a reader would, skipping blobs that are gone."""
        truth, spans = self.truth[tp], self.spans(tp)
        offset = now.log_start_offset
        avoid: set[str] = set()
        while offset <= now.sequence_counter:
            found, _ = chain_spans(offset, spans, now, avoid=frozenset(avoid))
            if not found:
                return f"offset {offset} is committed and cannot be read"
            batch = self._batch(found[0])
            if batch is None:
                avoid.add(found[0].entry.data_key)
                continue
            for at, record in enumerate(batch.records, found[0].start_offset):
                if truth.setdefault(at, record) != record:
                    return f"offset {at} was {truth[at]!r} and is {record!r}"
            offset = found[0].end_offset + 1
        return None

    def _batch(self, span: IndexSpan) -> codec.RecordBatch | None:
        key = self._uris.key(span.entry.data_key)
        stored = self._world.peek(key)
        if stored is None:
            return None
        at = (key, span.entry.byte_offset or 0)
        if at not in self._batches:
            end = len(stored.data) if span.entry.byte_length is None else at[1] + span.entry.byte_length
            self._batches[at] = codec.decode(stored.data[at[1] : end])
        return self._batches[at]

    def acknowledged(self, tp: TopicPartition, record: bytes, outcome: Appended) -> None:
        self._world.check(
            self.truth[tp].get(outcome.start_offset) == record,
            f"log: {tp} {outcome.start_offset} was acknowledged for {record!r}, and is "
            f"{self.truth[tp].get(outcome.start_offset)!r}",
        )

    def verdict(self) -> None:
        self.complaint()
        applied = [f"{tp}:{record.decode()}" for tp, truth in self.truth.items() for record in truth.values()]
        wrong = self.history.judge(applied)
        self._world.check(wrong is None, f"log: {wrong}")
        for tp in self._tps:
            offsets = sorted(self.truth[tp])
            self._world.check(offsets == list(range(1, len(offsets) + 1)), f"log: {tp} has gaps: {offsets}")


def settings() -> Settings:
    return Settings({LogSettings: SETTINGS}, {})


async def log(world: World, services: Callable[..., LogServices] = LogServices) -> None:
    """Brokers append to, read, compact, trim, fence and sweep a few partitions at once, and crash at any step."""
    rng = world.rng
    state = MemoryState()
    tps = [TopicPartition("t", number) for number in range(rng.randint(1, 2))]
    invariants = LogInvariants(world, state, tps)
    world.faults = msgspec.structs.replace(world.faults, crash=CRASH, slow=0.03)
    actors = _Actors(world, state, tps, invariants, services)
    brokers, workers = rng.randint(1, 3), rng.randint(1, 2)
    await asyncio.gather(
        *(world.keep(f"b{n}", actors.broker, skew_s=rng.uniform(-SKEW_S, SKEW_S)) for n in range(brokers)),
        *(world.keep(f"w{n}", actors.worker, skew_s=rng.uniform(-SKEW_S, SKEW_S)) for n in range(workers)),
        world.keep("o", actors.operator),
    )
    await _finish(world, state, invariants, tps)


class _Actors:
    """The processes of one world. Each is started again after a crash."""

    def __init__(
        self,
        world: World,
        state: MemoryState,
        tps: list[TopicPartition],
        invariants: LogInvariants,
        services: Callable[..., LogServices],
    ) -> None:
        self._world, self._rng, self._state, self._tps = world, world.rng, state, tps
        self._invariants, self._services = invariants, services
        self._appends = world.rng.randint(3, 6)

    async def broker(self, process: Process) -> None:
        rng = self._rng
        broker = Broker(process.context(settings()), FaultyMeta(process, self._state))
        names = [f"{process.node}-{number}" for number in range(rng.randint(1, 3))]
        await asyncio.gather(
            *(self._produce(process, broker, name, stamped=n % 2 == 0) for n, name in enumerate(names)),
            self._consume(process, broker),
            self._member(process, broker),
        )
        await broker.producer.drain()

    async def worker(self, process: Process) -> None:
        rng = self._rng
        services = self._services(process.context(settings()), FaultyMeta(process, self._state))
        for _ in range(rng.randint(3, 8)):
            try:
                if rng.random() < 0.3:
                    await services.sweeper.sweep_once()
                else:
                    await self._compact(services, rng)
            except (Unavailable, Overloaded, Conflict, UnknownTopicPartition):
                pass
            await process.clock.sleep(rng.uniform(0.0, 2.0))

    async def _compact(self, services: LogServices, rng: random.Random) -> None:
        """One partition alone, or all of them in one blob."""
        if rng.random() < 0.3:
            await services.scheduler.pass_once()
            return
        tp = rng.choice(self._tps)
        await services.retention.apply_once(tp)
        await services.compactor.compact_once(tp)

    async def operator(self, process: Process) -> None:
        rng = self._rng
        broker = Broker(process.context(settings()), FaultyMeta(process, self._state))
        for _ in range(rng.randint(0, 4)):
            await process.clock.sleep(rng.uniform(0.0, 3.0))
            tp = rng.choice(self._tps)
            try:
                await _operate(rng.random(), broker, tp, self._invariants)
            except (Unavailable, Overloaded, Conflict, UnknownTopicPartition, Fenced):
                continue

    async def _produce(self, process: Process, broker: Broker, name: str, stamped: bool) -> None:
        rng = self._rng
        sequence = dict.fromkeys(self._tps, 0)
        producer = broker.producer_id() if rng.random() < 0.5 else name
        for number in range(self._appends):
            tp = rng.choice(self._tps)
            stamp = Stamp(producer, sequence[tp]) if stamped else None
            if not await self._append(process, broker, tp, f"{name}-{number}".encode(), stamp):
                return  # a producer that cannot get through must not go on under the same id
            sequence[tp] += 1
            await process.clock.sleep(rng.choice((0.0, 0.01, 0.5)))

    async def _append(
        self, process: Process, broker: Broker, tp: TopicPartition, record: bytes, stamp: Stamp | None
    ) -> bool:
        """Sends one record, with retries when it is stamped. False when no retry got through."""
        history = self._invariants.history
        change = history.requested(f"{tp}:{record.decode()}")
        for _ in range(8):
            (outcome,) = await broker.produce([(tp, RecordChunk(_in_either_form(record), stamp))])
            if isinstance(outcome, Appended):
                self._invariants.acknowledged(tp, record, outcome)
                history.acknowledged(change)
                return True
            if stamp is None:  # only a stamped record may be sent again
                known = isinstance(outcome, (Unavailable, Overloaded, Fenced, Conflict))
                if known and not isinstance(outcome, OutcomeUnknown):
                    history.refused(change)
                return True
            await process.clock.sleep(self._rng.uniform(0.0, 1.0))
        return False

    async def _consume(self, process: Process, broker: Broker) -> None:
        rng = self._rng
        for _ in range(self._appends):
            tp = rng.choice(self._tps)
            offset = rng.randint(1, 8)
            try:
                found = await broker.reader.read(tp, offset, bytes_max=rng.choice((1, 20, 10_000)))
            except (UnknownTopicPartition, OffsetOutOfRange, Unavailable):
                await process.clock.sleep(0.3)
                continue
            read = [record for part in found.parts for record in part]
            truth = [self._invariants.truth[tp].get(at) for at in range(offset, found.next_offset)]
            self._world.check(read == truth, f"log: a reader of {tp} from {offset} got {read}, not {truth}")
            await process.clock.sleep(rng.uniform(0.0, 1.0))

    async def _member(self, process: Process, broker: Broker) -> None:
        """Claims, sometimes sleeps until another member has claimed, and commits anyway."""
        rng = self._rng
        for _ in range(self._appends):
            tp = rng.choice(self._tps)
            try:
                claimed = await broker.groups.claim(GROUP, tp)
                for _ in range(rng.randint(1, 3)):
                    await process.clock.sleep(rng.choice((0.0, 0.1, 2.0)))
                    now = await broker.reader.control(tp)
                    at = rng.randint(claimed.offset, now.next_offset)
                    generation = claimed.generation if rng.random() < 0.8 else None
                    note = str(generation) if generation is not None else ""
                    await broker.groups.commit(GROUP, tp, at, generation=generation, note=note)
            except (Unavailable, Overloaded, Conflict, Fenced, UnknownTopicPartition):
                await process.clock.sleep(rng.uniform(0.0, 1.0))


async def _operate(dice: float, broker: Broker, tp: TopicPartition, invariants: LogInvariants) -> None:
    if dice < 0.4:
        now = invariants.control(tp)
        await broker.admin.trim(tp, 1 + int(dice * 2.5 * (now.sequence_counter if now else 0)))
    elif dice < 0.7:
        await broker.admin.fence(tp, reason="world")
        await broker.admin.unfence(tp)
    else:
        await broker.admin.unfence(tp)


async def _finish(world: World, state: MemoryState, invariants: LogInvariants, tps: list[TopicPartition]) -> None:
    """Without faults, everything is readable, and what nothing refers to is swept."""
    await asyncio.sleep(world.faults.late_s)
    invariants.verdict()
    world.heal(CALM)
    last = world.process("sweeper")

    async def clean() -> None:
        services = LogServices(last.context(settings()), FaultyMeta(last, state))
        for _ in range(4):
            for tp in tps:
                try:
                    await services.retention.apply_once(tp)
                    await services.compactor.compact_once(tp)
                except UnknownTopicPartition:
                    continue
            await last.clock.sleep(HORIZON_S * 2 + 2 * SKEW_S)
            await services.sweeper.sweep_once()

    await last.spawn(clean())
    invariants.verdict()
    referred = {span.entry.data_key for tp in tps for span in invariants.spans(tp)}
    stored = {f"s3://lakebed/{info.key}" for info in world.keys(paths.ROOT)}
    world.check(stored <= referred, f"log: leaked {sorted(stored - referred)}")


def _in_either_form(record: bytes) -> Records:
    """Half of the records as record batches, the same ones in every retry."""
    plain = columns([record])
    return as_batches(plain, 1) if zlib.crc32(record) & 1 else plain
