"""What the consumers of a simulated queue applied, what its producers were promised, and what must hold between."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from lakebed.core.errors import Corrupt
from lakebed.queue import codec, paths
from lakebed.queue.appending import complete
from lakebed.queue.collector import Collector
from lakebed.queue.model import CollectedBatch, ConsumerManifest, PendingBatch, ProducerManifest
from lakebed.queue.segments import Segment
from lakebed.queue.settings import QueueSettings
from lakebed.sim.world import World

READS = frozenset({"get", "get_range", "head", "list", "children", "boot"})

_PRODUCER = msgspec.json.Decoder(ProducerManifest)
_CONSUMER = msgspec.json.Decoder(ConsumerManifest)
_SEGMENT = msgspec.json.Decoder(Segment)


class ConsumerTable:
    """What the consumers applied, and what the producers were promised."""

    def __init__(self, world: World, settings: QueueSettings) -> None:
        self._world, self._settings = world, settings
        self.ingested: dict[str, tuple[str, int]] = {}  # entry → its ingestor, and its place there
        self.durable: dict[str, str] = {}  # entry → location
        self.refused: set[str] = set()  # entries whose caller got an error: they are not in the queue
        self.poison: set[str] = set()  # locations that can only become dead letters
        self.bad: set[str] = set()  # entries that no consumer can process
        self.first: dict[str, str] = {}  # entry → the batch in which it was first enqueued
        self._inside: dict[str, frozenset[str]] = {}  # location → its entries; a batch never changes
        self.applied: dict[int, tuple[str, list[str]]] = {}  # sequence → location and entries, in order of applying
        self.acks: set[str] = set()
        self.epochs: dict[str, int] = {}  # location → the newest claim under which it was delivered
        world.invariant(settings.manifest_path, self.complaint)

    def producer(self) -> ProducerManifest:
        stored = self._world.peek(self._settings.manifest_path)
        return complete(_PRODUCER.decode(stored.data) if stored else ProducerManifest())

    def pending(self) -> tuple[str, ...]:
        """Every location that is pending, from the segments and from the head."""
        head = self.producer()
        rows: dict[str, PendingBatch] = {}
        for block in range(head.floor // (head.block or 1), -(-head.sealed // (head.block or 1))):
            stored = self._world.peek(paths.segment(self._settings.manifest_path, head.segments, block))
            rows |= _SEGMENT.decode(stored.data).entries if stored else {}
        sealed = [
            place for place, row in rows.items() if row.sequence < head.sealed and not head.is_removed(row.sequence)
        ]
        if len(sealed) + len(head.pending) != head.waiting:
            self._world.check(
                False, f"{head.waiting} batches wait, but {len(sealed)} and {len(head.pending)} are listed"
            )
        return (*sealed, *head.pending)

    def consumer(self) -> ConsumerManifest:
        stored = self._world.peek(paths.consumer_manifest(self._settings.manifest_path))
        return _CONSUMER.decode(stored.data) if stored else ConsumerManifest()

    def dead(self) -> set[str]:
        found = set()
        for info in self._world.keys(paths.dead_folder(self._settings.manifest_path)):
            stored = self._world.peek(info.key)
            assert stored is not None
            found.add(msgspec.json.decode(stored.data)["location"])
        return found

    def inside(self, location: str) -> frozenset[str]:
        """The entries of a batch that is stored now, or was when it was last looked at."""
        stored = self._world.peek(location)
        if location not in self._inside and stored is not None:
            with suppress(Corrupt):
                self._inside[location] = frozenset(entry.key.decode() for entry in codec.decode(stored.data))
        return self._inside.get(location, frozenset())

    def complaint(self) -> str | None:
        if self._world.trace[-1][3] in READS:
            return None
        pending, consumer = self.pending(), self.consumer()
        dead = self.dead()
        finished = {location for location, _ in self.applied.values()} | dead
        if dead & self.acks:
            return f"{min(dead & self.acks)} was acked, and is a dead letter"
        if len(set(pending)) != len(pending):
            return "a location is pending twice"
        for location in pending:
            if location not in consumer.done and self._world.peek(location) is None:
                return f"{location} is pending and its data is gone"
        for location in pending:
            for entry in self.inside(location):
                self.first.setdefault(entry, location)
        places = [*pending, *dead]
        held = frozenset().union(*map(self.inside, places)) if places else frozenset()
        for entry, location in self.durable.items():
            if location not in finished and location not in pending and not self._rests(entry, held):
                return f"{entry} was called durable, but {location} is neither pending nor finished"
        return None

    def _rests(self, entry: str, held: frozenset[str]) -> bool:
        """Whether an entry whose batch was split is in the queue, a dead letter or applied."""
        return entry in held or any(entry in entries for _, entries in self.applied.values())

    def acked(self, batch: CollectedBatch) -> None:
        newest = self.epochs[batch.location]
        self._world.check(newest == batch.claimed.epoch, f"{batch.location} was acked by a collector that had lost it")
        self.acks.add(batch.location)

    def delivered(self, collector: Collector, batch: CollectedBatch) -> None:
        self._world.check(batch.location not in self.acks, f"{batch.location} was acked, and is delivered again")
        self.epochs[batch.location] = max(batch.claimed.epoch, self.epochs.get(batch.location, 0))
        claim = self.consumer().claims.get(batch.location)
        self._world.check(
            claim is not None and claim.epoch == batch.claimed.epoch,
            f"{collector.id} got {batch.location}, claimed by {claim.collector if claim else 'no collector'}",
        )

    def apply(self, batch: CollectedBatch, *, ordered: bool) -> None:
        """The consumer's transaction: the entries and the sequence together, or nothing when it has them."""
        if batch.sequence in self.applied:
            same = self.applied[batch.sequence][0] == batch.location
            self._world.check(same, f"sequence {batch.sequence} names two batches")
            return
        newest = max(self.applied, default=0)
        late = batch.location not in self.pending()  # another has buried or split it since it was claimed
        self._world.check(
            late or not ordered or batch.sequence > newest, f"sequence {batch.sequence} is applied first after {newest}"
        )
        if late:
            return  # a consumer in order knows a later sequence; one in parallel has to check
        self.applied[batch.sequence] = (batch.location, [entry.key.decode() for entry in batch.entries])

    def verdict(self) -> None:
        dead = self.dead()
        applied = [entry for _, (_, entries) in sorted(self.applied.items()) for entry in entries]
        self._world.check(len(set(applied)) == len(applied), "an entry is applied twice")
        buried = frozenset().union(*map(self.inside, dead)) if dead else frozenset()
        missing = {entry for entry, location in self.durable.items() if location not in dead} - set(applied) - buried
        self._world.check(not missing, f"durable and never applied: {sorted(missing)[:5]}")
        self._world.check(self.poison <= dead, "a batch that nobody can read is neither delivered nor a dead letter")
        self._world.check(not self.refused & set(applied), "an entry is applied though its caller got an error")
        self._world.check(self.bad.isdisjoint(applied), "an entry that nobody can process is applied")
        mixed = [location for location in dead if len(self.inside(location)) > 1]
        self._world.check(not mixed, f"entries became dead letters with their neighbours: {mixed[:3]}")
        last: dict[str, int] = {}
        moved = {entry for place, entries in self.applied.values() for entry in entries if self.first[entry] != place}
        for entry in applied:
            if entry in moved:
                continue  # its batch was split: it comes later than its order says
            ingestor, place = self.ingested[entry]
            self._world.check(last.get(ingestor, -1) < place, f"{entry} is out of its ingestor's order")
            last[ingestor] = place
