"""Dead letters: batches that could not be processed, each kept with its data and the reason until a person decides.

A letter is written before its batch is marked done, so a crash in between only repeats the two steps. Replay stores the
data under a fresh name and appends it like any batch; what became of a letter is kept forever.

A batch of several entries is split first, so that one bad entry does not take others with it: a gateway puts entries of
several producers into one batch. The entries are stored again as smaller batches, which replace the batch in the
producer manifest in one conditional write, at the end of the queue and with sequences of their own. Pieces that can be
processed are; the others are split again, until the bad entry is a batch of its own and becomes a dead letter alone.
The decision to split is stored before, so from then on no collector gets the batch. A crash before the write leaves
pieces that nothing refers to (swept) and a batch that is split again; a crash after it leaves a claim of a batch that
is no longer pending, which the sweeper removes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Literal

import msgspec
from msgspec.structs import replace

from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, Conflict, Corrupt, Invalid, LakebedError, NotFound, Stale, Unavailable
from lakebed.core.logs import logger
from lakebed.queue import codec, paths
from lakebed.queue.appending import REPLAY
from lakebed.queue.consumer import Consumer
from lakebed.queue.fetch import fetch
from lakebed.queue.model import (
    Append,
    BatchTrouble,
    Claimed,
    ClosedLetter,
    DeadLetter,
    Durable,
    GenerationExpired,
    KeyValueEntry,
)
from lakebed.queue.producer import Producer
from lakebed.queue.settings import QueueSettings
from lakebed.store.model import StoredObject
from lakebed.store.runtime import StoreRuntime

PIECES_MAX = 16  # of one batch: a bad one among 1,000 entries is alone after three splits
TRIES_MAX = 3  # the generation can be over only when storing the pieces took a whole horizon

_LETTER = msgspec.json.Decoder(DeadLetter)
_CLOSED = msgspec.json.Decoder(ClosedLetter)

log = logger("queue")


class DeadLetters:
    def __init__(
        self, settings: QueueSettings, runtime: StoreRuntime, *, producer: Producer, consumer: Consumer
    ) -> None:
        self._settings, self._store, self._clock, self._ids = settings, runtime.store, runtime.clock, runtime.ids
        self._producer, self._consumer = producer, consumer
        self._splitter = Splitter(settings, runtime, producer=producer)
        self._buried = runtime.metrics.counter("lakebed_queue_buried_total")

    async def set_aside(self, claimed: Claimed, trouble: BatchTrouble) -> bool:
        """Splits the batch, or buries it when it cannot be split; True when it is a dead letter now."""
        if await self._splitter.split(claimed, trouble.reason):
            await self._consumer.ack(claimed)
            return False
        await self.bury(claimed, trouble)
        log.error("batch became a dead letter", location=claimed.location, error=trouble.reason)
        return True

    async def bury(self, claimed: Claimed, trouble: BatchTrouble) -> DeadLetter:
        """Writes the letter, then marks the batch as done. Idempotent; raises Fenced when the claim is lost."""
        letter = DeadLetter(
            id=paths.dead_id(claimed.sequence, claimed.location),
            location=claimed.location,
            sequence=claimed.sequence,
            reason=trouble.reason,
            rejections=trouble.count,
            buried_ms=trouble.at_ms,
            enqueued_ms=claimed.enqueued_ms,
        )
        try:
            await self._store.create(self._key(letter.id), msgspec.json.encode(letter))
        except AlreadyExists as error:
            letter = decode_letter(error.current)
        await self._consumer.bury(claimed)
        self._buried.inc()
        return letter

    async def letters(self) -> AsyncIterator[DeadLetter]:
        """Every letter, oldest sequence first. One that does not decode is Corrupt: none is skipped."""
        async for info in self._store.list(paths.dead_folder(self._settings.manifest_path)):
            try:
                yield decode_letter(await self._store.get(info.key))
            except NotFound:
                continue  # closed since it was listed

    async def count(self) -> int:
        return len([info async for info in self._store.list(paths.dead_folder(self._settings.manifest_path))])

    async def show(self, letter_id: str) -> DeadLetter:
        return decode_letter(await self._get(letter_id))

    async def entries(self, letter: DeadLetter) -> list[KeyValueEntry]:
        """The letter's entries. Raises Corrupt when they do not decode (often the reason it is here)."""
        stored = await self._store.get(letter.location)
        return codec.decode(stored.data, bytes_max=self._settings.batch_bytes_max)

    async def replay(self, letter_id: str, reason: str) -> Durable:
        """Enqueues the letter's data again, as a new batch at the end of the queue, and closes the letter.

        A call that was interrupted at any point can be repeated, at any time: the new name is written into the letter
        first, and the manifest remembers that the letter was enqueued until it is closed.
        """
        _demand_reason(reason)
        letter = await self._ready(letter_id)
        if (closed := await self._closed(letter, "replayed")) is not None:
            return Durable(letter.replay_as, closed.sequence)
        head = await self._producer.read()
        if letter.id in head.replays:  # an earlier call enqueued it and was interrupted
            durable = Durable(letter.replay_as, head.replays[letter.id])
        else:
            durable = await self._enqueue_again(letter)
        await self._close(letter, "replayed", reason, durable.sequence)
        return durable

    async def _enqueue_again(self, letter: DeadLetter) -> Durable:
        """Stores the data under the name in the letter and appends it, under a new name when its generation is over.

        An append of the old name is refused from then on, so only one of the names is ever enqueued.
        """
        data = (await self._store.get(letter.location)).data
        for attempt in range(TRIES_MAX):
            letter = await self._name_replay(letter.id, anew=attempt > 0)
            await self._store.create(letter.replay_as, data)
            ingestor, generation = f"{REPLAY}{letter.id}", letter.replay_generation
            batch = Append(ingestor, 1, generation, letter.replay_as, len(data), _count(data))
            try:
                return (await self._producer.append([batch]))[0]
            except GenerationExpired:
                await self._producer.read()
        raise Unavailable(f"{letter.id} could not be enqueued within a generation", hint="retry")

    async def discard(self, letter_id: str, reason: str) -> DeadLetter:
        """Deletes the letter and its data. Its description and the reason are kept."""
        _demand_reason(reason)
        letter = await self._ready(letter_id)
        if await self._closed(letter, "discarded") is None:
            if letter.id in (await self._producer.read()).replays:
                raise Conflict(f"{letter.id} was replayed, and not closed yet", hint="replay it again to close it")
            await self._close(letter, "discarded", reason)
        return letter

    async def _ready(self, letter_id: str) -> DeadLetter:
        """The letter, once its batch is marked as done: before that, a collector would write the letter again."""
        letter = decode_letter(await self._get(letter_id))
        consumer = await self._consumer.read()
        producer = await self._producer.read()
        if letter.location not in consumer.done and not producer.is_removed(letter.sequence):
            raise Conflict(f"{letter_id} is still being written", hint="wait for its collector to finish, then retry")
        return letter

    async def _closed(self, letter: DeadLetter, action: Literal["replayed", "discarded"]) -> ClosedLetter | None:
        """What an interrupted call decided, after finishing it; None when no call did. Raises Conflict for another."""
        try:
            stored = await self._store.get(paths.closed_letter(self._settings.manifest_path, letter.id))
        except NotFound:
            return None
        closed = _CLOSED.decode(stored.data)
        await self._delete(letter)
        if closed.action != action:
            raise Conflict(f"{letter.id} was {closed.action} before, because: {closed.reason}")
        return closed

    async def _name_replay(self, letter_id: str, *, anew: bool) -> DeadLetter:
        stored = await self._get(letter_id)
        letter = decode_letter(stored)
        if letter.replay_as and not anew:
            return letter
        generation = await self._producer.generation()
        form: Literal["binary", "json"] = "json" if letter.location.endswith(".json") else "binary"
        name = self._settings.location(generation, self._ids.uuid(), form)
        letter = replace(letter, replay_as=name, replay_generation=generation)
        try:
            await self._store.replace(stored.key, msgspec.json.encode(letter), stored.etag)
        except Stale as error:
            raise Conflict(
                f"{letter_id} is being closed by another process", hint="lakebed queue dlq list shows what is left"
            ) from error
        return letter

    async def _close(
        self, letter: DeadLetter, action: Literal["replayed", "discarded"], reason: str, sequence: int = 0
    ) -> None:
        closed = ClosedLetter(letter, action, reason, now_ms(self._clock), sequence=sequence)
        with suppress(AlreadyExists):  # it was closed before; only the deletes are left
            await self._store.create(
                paths.closed_letter(self._settings.manifest_path, letter.id), msgspec.json.encode(closed)
            )
        await self._delete(letter)

    async def _delete(self, letter: DeadLetter) -> None:
        await self._store.delete(letter.location)
        await self._producer.forget_replay(letter.id)
        await self._store.delete(self._key(letter.id))

    async def _get(self, letter_id: str) -> StoredObject:
        try:
            return await self._store.get(self._key(letter_id))
        except NotFound as error:
            raise NotFound(f"no dead letter {letter_id}", hint="lakebed queue dlq list shows them") from error

    def _key(self, letter_id: str) -> str:
        return paths.dead_letter(self._settings.manifest_path, letter_id)


def decode_letter(stored: StoredObject) -> DeadLetter:
    try:
        return _LETTER.decode(stored.data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Corrupt(f"dead letter {stored.key!r} does not decode: {error}", key=stored.key) from error


def _demand_reason(reason: str) -> None:
    if not reason.strip():
        raise Invalid("closing a dead letter needs a reason", hint="give --reason")


def _count(data: bytes) -> int:
    try:
        return len(codec.decode(data))
    except LakebedError:
        return 0  # it may not decode here; a newer consumer may read it


class Splitter:
    def __init__(self, settings: QueueSettings, runtime: StoreRuntime, *, producer: Producer) -> None:
        self._settings, self._store, self._ids, self._producer = settings, runtime.store, runtime.ids, producer
        self._splits = runtime.metrics.counter("lakebed_queue_splits_total")

    async def split(self, claimed: Claimed, reason: str) -> bool:
        """Enqueues the batch's entries again as smaller batches; returns False when there is nothing to split.

        Idempotent. Only for a batch that is marked as dead, because no other collector may get it.
        Raises Unavailable when the batch cannot be read now: retry, it is not lost.
        """
        entries = await self._entries(claimed)
        if not entries and (await self._producer.read()).is_removed(claimed.sequence):
            return True  # another collector split it, and its data is swept already
        if len(entries) < 2:
            return False
        for _ in range(TRIES_MAX - 1):
            try:
                return await self._replace(claimed, entries, reason)
            except GenerationExpired:
                await self._producer.read()
        return await self._replace(claimed, entries, reason)

    async def _entries(self, claimed: Claimed) -> list[KeyValueEntry]:
        """The entries; none when the batch is gone or does not decode on two reads: then it becomes one letter."""
        for _ in range(2):
            try:
                return await fetch(self._store, claimed.location, bytes_max=self._settings.batch_bytes_max)
            except NotFound:
                break
            except Corrupt:
                continue
        return []

    async def _replace(self, claimed: Claimed, entries: list[KeyValueEntry], reason: str) -> bool:
        generation = await self._producer.generation()
        size = -(-len(entries) // PIECES_MAX)
        pieces = [
            await self._stored(entries[first : first + size], generation) for first in range(0, len(entries), size)
        ]
        if await self._producer.split(claimed.sequence, claimed.size_bytes, pieces):
            self._splits.inc()
            log.warning(
                "batch was split",
                location=claimed.location,
                sequence=claimed.sequence,
                pieces=len(pieces),
                reason=reason,
            )
        return True

    async def _stored(self, entries: list[KeyValueEntry], generation: int) -> Append:
        form = self._settings.batch_format
        encode = partial(codec.encode, entries, form=form, compression=self._settings.compression)
        data = await asyncio.to_thread(encode) if codec.size_of(entries) > codec.APART_BYTES else encode()
        location = self._settings.location(generation, self._ids.uuid(), form)
        await self._store.create(location, data)
        return Append("", 0, generation, location, len(data), len(entries))
