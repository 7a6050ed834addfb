"""Receives parts: streams each into the bucket while hashing it, then adds it to the tick's register."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import LakebedError, NotFound, TooLarge, Unprocessable
from lakebed.store.model import read_record
from lakebed.store.protocol import Store
from lakebed.store.register import Register
from lakebed.ticks import paths
from lakebed.ticks import transitions as tick
from lakebed.ticks.model import CommitRecord, StoredPart, TickId, TickState
from lakebed.ticks.settings import TicksSettings


class PartResponse(msgspec.Struct, frozen=True):
    """The response to a part. `already_present` when the same bytes were stored before."""

    file_seq: int
    sha256: str
    size_bytes: int
    already_present: bool = False


def register_of(context: Context, of: TickId) -> Register[TickState]:
    """The tick's register. Fresh for every request: its first change reads what other replicas wrote."""
    return Register(context, paths.state(of), TickState, TickState(), name="tick")


async def recorded(store: Store, of: TickId) -> CommitRecord | None:
    """The tick's commit record, which is kept for ever; None when it is not committed."""
    try:
        return read_record(await store.get(paths.commit(of)), CommitRecord)
    except NotFound:
        return None


class Receiver:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._settings = context.settings.of(TicksSettings)
        self._parts = context.metrics.counter("lakebed_ticks_parts_total")
        self._bytes = context.metrics.counter("lakebed_ticks_part_bytes_total")

    async def put(self, of: TickId, seq: int, sha256: str, chunks: AsyncIterator[bytes]) -> PartResponse:
        """Stores a part. Idempotent by hash; raises PartDiffers rather than overwrite, TooLarge, Unprocessable."""
        register = register_of(self._context, of)
        state = (await register.read()).value
        held = state.parts.get(str(seq))
        if not state.exists and (record := await recorded(self._context.store, of)):
            return await self._committed(record, seq, sha256, chunks)
        if held is not None:
            await self._discard(chunks)  # the client is still sending: it reads the response only when it is done
            tick.same_or_raise(held, seq, sha256)
            return self._response(seq, held, present=True)
        key = paths.part(of, seq, sha256, self._context.ids.token())
        meter = _Meter(chunks, sha256, self._settings.part_bytes_max)
        await self._context.store.upload(key, meter.checked())
        part = StoredPart(sha256, meter.size_bytes, now_ms(self._context.clock), key)
        try:
            added = await register.change(
                lambda now: tick.receive(
                    now, of, seq, part, now_ms=part.received_at_ms, parts_max=self._settings.parts_max
                )
            )
        except LakebedError as error:
            if not getattr(error, "retry_after_s", 0.0):  # refused: nothing will refer to these bytes
                await self._context.store.delete(key)
            raise
        if not added:
            await self._context.store.delete(key)
        return self._response(seq, part, present=not added)

    async def delete(self, of: TickId, seq: int) -> bool:
        """Deletes a part before the finalize; False when there is none. Raises Conflict or TooEarly after it."""
        register = register_of(self._context, of)
        dropped = await register.change(lambda now: tick.drop(now, of, seq, now_ms=now_ms(self._context.clock)))
        if dropped is not None:
            await self._context.store.delete(dropped.key)
        return dropped is not None

    async def _committed(
        self, record: CommitRecord, seq: int, sha256: str, chunks: AsyncIterator[bytes]
    ) -> PartResponse:
        """The response to a part of a tick that was committed, and whose state was swept since."""
        await self._discard(chunks)
        if record.parts.get(str(seq)) != sha256:
            raise tick.committed(f"part {seq} was not added")
        self._parts.labels(outcome="already_present").inc()
        return PartResponse(seq, sha256, 0, already_present=True)

    async def _discard(self, chunks: AsyncIterator[bytes]) -> None:
        size = 0
        async for chunk in chunks:
            size += len(chunk)
            if size > self._settings.part_bytes_max:
                raise _too_large(self._settings.part_bytes_max)

    def _response(self, seq: int, part: StoredPart, *, present: bool) -> PartResponse:
        self._parts.labels(outcome="already_present" if present else "stored").inc()
        if not present:
            self._bytes.inc(part.size_bytes)
        return PartResponse(seq, part.sha256, part.size_bytes, present)


class _Meter:
    """Counts and hashes a stream; raises at its end, before the upload is complete, when the hash is wrong."""

    def __init__(self, chunks: AsyncIterator[bytes], sha256: str, bytes_max: int) -> None:
        self._chunks, self._sha256, self._bytes_max = chunks, sha256, bytes_max
        self.size_bytes = 0

    async def checked(self) -> AsyncIterator[bytes]:
        digest = hashlib.sha256()
        async for chunk in self._chunks:
            self.size_bytes += len(chunk)
            if self.size_bytes > self._bytes_max:
                raise _too_large(self._bytes_max)
            digest.update(chunk)
            if chunk:
                yield chunk
        if not self.size_bytes:
            raise Unprocessable("the part is empty")
        if digest.hexdigest() != self._sha256:
            raise Unprocessable(
                "the part's bytes do not have the hash in X-Sha256",
                hint="send the part again",
                error_class="sha_mismatch",
                received_sha256=digest.hexdigest(),
            )


def _too_large(bytes_max: int) -> TooLarge:
    return TooLarge(f"the part is larger than {bytes_max} bytes", hint="send smaller parts", limit_bytes=bytes_max)
