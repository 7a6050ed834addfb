"""Dead letters: batches that could not be processed, each kept with its data and the reason until a person decides.

A letter is written before its batch is marked done, so a crash in between only repeats the burial. Replay stores the
data under a fresh name and appends it through the same gate as any batch; what became of a letter is kept for good.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Literal

import msgspec
from msgspec.structs import replace

from lakebed.clock import Clock, now_ms
from lakebed.errors import AlreadyExists, Conflict, Corrupt, Invalid, LakebedError, NotFound, Stale
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.queue import codec, paths
from lakebed.queue.consumer import Consumer
from lakebed.queue.errors import Outlived
from lakebed.queue.model import Append, Claimed, ClosedLetter, DeadLetter, Durable, KeyValueEntry, Trouble
from lakebed.queue.producer import Producer
from lakebed.queue.settings import QueueSettings
from lakebed.store.model import StoredObject
from lakebed.store.protocol import Store

_LETTER = msgspec.json.Decoder(DeadLetter)


class DeadLetters:
    def __init__(
        self,
        settings: QueueSettings,
        store: Store,
        clock: Clock,
        *,
        ids: Ids,
        metrics: Metrics,
        producer: Producer,
        consumer: Consumer,
    ) -> None:
        self._settings, self._store, self._clock, self._ids = settings, store, clock, ids
        self._producer, self._consumer = producer, consumer
        self._buried = metrics.counter("lakebed_queue_buried_total")

    async def bury(self, claimed: Claimed, trouble: Trouble) -> DeadLetter:
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
        """Every letter, oldest sequence first. One that does not decode is Corrupt: nothing is passed over."""
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

        Safe to repeat after a crash: the new name is written into the letter first, and the append is recognised.
        """
        _demand_reason(reason)
        letter = await self._ready(letter_id)
        data = (await self._store.get(letter.location)).data
        letter = await self._name_replay(letter_id)
        await self._store.create(letter.replay_as, data)
        batch = Append(f"replay-{letter.id}", 1, letter.replay_generation, letter.replay_as, len(data), _count(data))
        try:
            durable = (await self._producer.append([batch]))[0]
        except Outlived as error:
            raise Conflict(
                f"a replay of {letter.id} was begun long ago and never closed; it may have been enqueued",
                hint=f"look whether {letter.replay_as!r} was processed, then discard the letter",
            ) from error
        await self._close(letter, "replayed", reason)
        return durable

    async def discard(self, letter_id: str, reason: str) -> DeadLetter:
        """Removes the letter and its data. What it was, and why it went, is kept."""
        _demand_reason(reason)
        letter = await self._ready(letter_id)
        await self._close(letter, "discarded", reason)
        return letter

    async def _ready(self, letter_id: str) -> DeadLetter:
        """The letter, once its burial is complete: before that, whoever finishes it would bring it back."""
        letter = decode_letter(await self._get(letter_id))
        consumer = await self._consumer.read()
        producer = await self._producer.read()
        if letter.location in producer.pending and letter.location not in consumer.done:
            raise Conflict(f"{letter_id} is still being buried", hint="wait for a collector to finish, then try again")
        return letter

    async def _name_replay(self, letter_id: str) -> DeadLetter:
        stored = await self._get(letter_id)
        letter = decode_letter(stored)
        if letter.replay_as:
            return letter
        generation = await self._producer.generation()
        form: Literal["binary", "json"] = "json" if letter.location.endswith(".json") else "binary"
        name = paths.batch(self._settings.data_path_prefix, generation, self._ids.uuid(), form)
        letter = replace(letter, replay_as=name, replay_generation=generation)
        try:
            await self._store.replace(stored.key, msgspec.json.encode(letter), stored.etag)
        except Stale as error:
            raise Conflict(f"{letter_id} is being closed by somebody else", hint="list the dead letters") from error
        return letter

    async def _close(self, letter: DeadLetter, action: Literal["replayed", "discarded"], reason: str) -> None:
        closed = ClosedLetter(letter, action, reason, now_ms(self._clock))
        with suppress(AlreadyExists):  # closed before, up to here; what remains is to remove it
            await self._store.create(
                paths.closed_letter(self._settings.manifest_path, letter.id), msgspec.json.encode(closed)
            )
        await self._store.delete(letter.location)
        await self._store.delete(self._key(letter.id))

    async def _get(self, letter_id: str) -> StoredObject:
        try:
            return await self._store.get(self._key(letter_id))
        except NotFound as error:
            raise NotFound(f"there is no dead letter {letter_id}", hint="lakebed queue dlq list shows them") from error

    def _key(self, letter_id: str) -> str:
        return paths.dead_letter(self._settings.manifest_path, letter_id)


def decode_letter(stored: StoredObject) -> DeadLetter:
    try:
        return _LETTER.decode(stored.data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Corrupt(f"dead letter {stored.key!r} does not decode: {error}", key=stored.key) from error


def _demand_reason(reason: str) -> None:
    if not reason.strip():
        raise Invalid("closing a dead letter needs a reason", hint="say why, for whoever reads this later")


def _count(data: bytes) -> int:
    try:
        return len(codec.decode(data))
    except LakebedError:
        return 0  # it may be undecodable; it is replayed for a consumer that can read it now
