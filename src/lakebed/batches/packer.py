"""Packs the frames that arrive within a short time into one raw blob, and says which batches a pack is needed for.

The bytes come first, as without packs: a caller gets the place of its frame when the pack is stored, and creates its
manifest then. A frame that is alone in its flush is stored as a blob of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine
from typing import Any, NamedTuple

from lakebed.batches import acceptance, paths
from lakebed.batches.acceptance import Submission
from lakebed.batches.codec.pack import FRAMES_MAX, HEAD, PackedFrame, decode_table, encode_pack, table_bytes
from lakebed.batches.model import AcceptedBatch, FramePlace
from lakebed.core.errors import AlreadyExists, Corrupt, LakebedError, NotFound, Stale, Unavailable
from lakebed.core.logs import logger
from lakebed.store.model import read_record
from lakebed.store.protocol import Store
from lakebed.store.runtime import StoreRuntime

PACK_BYTES_MAX = 8 * 1024 * 1024  # frames of one pack: a larger PUT takes longer than it saves

log = logger("batches")


class _Waiting(NamedTuple):
    submitted: Submission
    place: asyncio.Future[FramePlace]


class Packer:
    """Stores the frames of one collector. A flush ends after `wait_s`, or sooner when a pack is full."""

    def __init__(self, runtime: StoreRuntime, *, wait_s: float, bytes_max: int = PACK_BYTES_MAX) -> None:
        self._store, self._clock = runtime.store, runtime.clock
        self._wait_s, self._bytes_max = wait_s, bytes_max
        self._open: list[_Waiting] = []
        self._open_bytes = 0
        self._flushes: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Task[None] | None = None

    async def store(self, submitted: Submission) -> FramePlace:
        """Returns when the frame is stored. Raises what the store raises; then nobody may refer to it."""
        mine = _Waiting(submitted, asyncio.get_running_loop().create_future())
        if self._open and self._open_bytes + len(submitted.frame) > self._bytes_max:
            self._close()
        self._open.append(mine)
        self._open_bytes += len(submitted.frame)
        if len(self._open) >= FRAMES_MAX or self._open_bytes >= self._bytes_max:
            self._close()
        elif self._timer is None:
            self._timer = self._spawn(self._later())
        try:
            return await asyncio.shield(mine.place)
        finally:
            del mine  # an error refers to this frame: a cycle would keep the upload until the garbage collector runs

    async def _later(self) -> None:
        await self._clock.sleep(self._wait_s)
        self._timer = None
        self._close()

    def _close(self) -> None:
        """Ends the open pack: it is written, and the next frame opens another."""
        taken, self._open, self._open_bytes = self._open, [], 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if taken:
            self._spawn(self._flush(taken))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._flushes.add(task)
        task.add_done_callback(self._flushes.discard)
        return task

    async def _flush(self, taken: list[_Waiting]) -> None:
        try:
            places = await self._write([each.submitted for each in taken])
        except LakebedError as error:
            for each in taken:
                each.place.set_exception(error.with_traceback(None))  # its frames hold all that was taken
                each.place.exception()  # a caller that has gone does not ask for it
            return
        for each, place in zip(taken, places, strict=True):
            each.place.set_result(place)

    async def _write(self, frames: list[Submission]) -> list[FramePlace]:
        if len(frames) == 1:
            await write_blob(self._store, frames[0])
            return [acceptance.whole_place(frames[0].sha256, len(frames[0].frame))]
        data, table = encode_pack([(each.batch.identity, each.sha256, each.frame) for each in frames])
        key = paths.pack_key(hashlib.sha256(data).hexdigest())
        await write_bytes(self._store, key, data)
        return [each.place(key) for each in table]


async def write_blob(store: Store, submitted: Submission) -> None:
    """Makes the blob exist under its hash. One with damaged bytes is replaced."""
    await write_bytes(store, submitted.blob_key, submitted.frame)


async def write_bytes(store: Store, key: str, data: bytes) -> None:
    """Makes these bytes exist at the key that contains their hash."""
    try:
        await store.create(key, data)
    except AlreadyExists as error:
        log.error("damaged raw blob is rewritten", key=key)
        try:
            await store.replace(key, data, error.current.etag)
        except Stale as stale:
            raise Unavailable(f"{key!r} changed while it was being repaired") from stale


async def read_table(store: Store, pack: str) -> list[PackedFrame]:
    """The frames of a pack. Raises NotFound, or Corrupt with its key."""
    try:
        head = await store.get_range(pack, 0, HEAD.size)
        return decode_table(head + await store.get_range(pack, HEAD.size, table_bytes(head)))
    except Corrupt as error:
        raise Corrupt(f"{pack!r} {error.message}", key=pack) from error


async def accepted_at(store: Store, frame: PackedFrame) -> AcceptedBatch | None:
    """The manifest of this frame's identity; None when it is not accepted."""
    try:
        return read_record(await store.get(paths.accepted_key(frame.identity)), AcceptedBatch)
    except NotFound:
        return None
