"""The splitter: takes a batch apart that cannot be processed, so that one bad entry does not take its neighbours along.

A broker puts entries of several producers into one batch. When such a batch is to be set aside, its entries are stored
again as smaller batches, which take its place in the producer manifest in one conditional write, at the end of the
queue and with sequences of their own. Pieces that can be processed are; the others are split again, until the bad entry
is a batch of its own and becomes a dead letter alone.

The decision to set the batch aside was written down before, so from then on nobody hands it out. A crash before the
write leaves pieces that nothing refers to (swept) and a batch that is split again; a crash after it leaves a claim of a
batch that is no longer pending, which the cleaner removes.
"""

from __future__ import annotations

import asyncio
from functools import partial

from lakebed.errors import Corrupt, NotFound
from lakebed.ids import Ids
from lakebed.logs import logger
from lakebed.metrics import Metrics
from lakebed.queue import codec, paths
from lakebed.queue.errors import Outlived
from lakebed.queue.model import Append, Claimed, KeyValueEntry
from lakebed.queue.producer import Producer
from lakebed.queue.settings import QueueSettings
from lakebed.store.protocol import Store

PIECES_MAX = 16  # of one batch: a bad one among 1,000 entries is alone after three splits
TRIES_MAX = 3  # the generation can be over only when storing the pieces took a whole horizon

log = logger("queue")


class Splitter:
    def __init__(
        self, settings: QueueSettings, store: Store, *, ids: Ids, metrics: Metrics, producer: Producer
    ) -> None:
        self._settings, self._store, self._ids, self._producer = settings, store, ids, producer
        self._splits = metrics.counter("lakebed_queue_splits_total")

    async def split(self, claimed: Claimed, reason: str) -> bool:
        """Puts the batch's entries back as smaller batches; the answer is False when there is nothing to split.

        Idempotent. Only for a batch that is marked to be set aside, because nobody else may be given it.
        Raises Unavailable when the batch cannot be read now: try again, it is not lost.
        """
        entries = await self._entries(claimed)
        if not entries and claimed.location not in (await self._producer.read()).pending:
            return True  # another split it, and its data is cleaned up already
        if len(entries) < 2:
            return False
        for _ in range(TRIES_MAX - 1):
            try:
                return await self._replace(claimed, entries, reason)
            except Outlived:
                await self._producer.read()
        return await self._replace(claimed, entries, reason)

    async def _entries(self, claimed: Claimed) -> list[KeyValueEntry]:
        """The entries; none when the batch is gone or does not decode: then it is one letter as it is."""
        try:
            data = (await self._store.get(claimed.location)).data
            decode = partial(codec.decode, data, bytes_max=self._settings.batch_bytes_max)
            return await asyncio.to_thread(decode) if len(data) > codec.APART_BYTES else decode()
        except (NotFound, Corrupt):
            return []

    async def _replace(self, claimed: Claimed, entries: list[KeyValueEntry], reason: str) -> bool:
        generation = await self._producer.generation()
        size = -(-len(entries) // PIECES_MAX)
        pieces = [
            await self._stored(entries[first : first + size], generation) for first in range(0, len(entries), size)
        ]
        if await self._producer.split(claimed.location, pieces):
            self._splits.inc()
            log.warning(
                "a batch was split",
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
        location = paths.batch(self._settings.data_path_prefix, generation, self._ids.uuid(), form)
        await self._store.create(location, data)
        return Append("", 0, generation, location, len(data), len(entries))
