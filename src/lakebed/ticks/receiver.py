"""Takes parts in: streams each into the bucket while hashing it, then makes it true in the tick's register."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

import msgspec

from lakebed.clock import now_ms
from lakebed.context import Context
from lakebed.errors import LakebedError, TooLarge, Unprocessable
from lakebed.store.register import Register
from lakebed.ticks import paths, tick
from lakebed.ticks.model import Part, TickId, TickState
from lakebed.ticks.settings import TicksSettings


class Stored(msgspec.Struct, frozen=True):
    """The answer to a part. `already_present` when the same bytes had been taken before."""

    file_seq: int
    sha256: str
    size_bytes: int
    already_present: bool = False


def register_of(context: Context, of: TickId) -> Register[TickState]:
    """The tick's register. Fresh for every request: what another replica wrote is seen by its first change."""
    return Register(
        context.store,
        paths.state(of),
        TickState,
        TickState(),
        clock=context.clock,
        ids=context.ids,
        metrics=context.metrics,
        name="tick",
    )


class Receiver:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._settings = context.settings.of(TicksSettings)
        self._parts = context.metrics.counter("lakebed_ticks_parts_total")
        self._bytes = context.metrics.counter("lakebed_ticks_part_bytes_total")

    async def put(self, of: TickId, seq: int, sha256: str, chunks: AsyncIterator[bytes]) -> Stored:
        """Stores a part. Idempotent by hash; raises PartDiffers rather than overwrite, TooLarge, Unprocessable."""
        register = register_of(self._context, of)
        held = (await register.read()).value.parts.get(str(seq))
        if held is not None:
            await self._read_away(chunks)  # the client is still sending: it hears the answer only when it is done
            tick.same_or_raise(held, seq, sha256)
            return self._told(seq, held, present=True)
        key = paths.part(of, seq, sha256, self._context.ids.token())
        meter = _Meter(chunks, sha256, self._settings.part_bytes_max)
        await self._context.store.upload(key, meter.checked())
        part = Part(sha256, meter.size_bytes, now_ms(self._context.clock), key)
        try:
            added = await register.change(
                lambda now: tick.receive(
                    now, of, seq, part, now_ms=part.received_at_ms, parts_max=self._settings.parts_max
                )
            )
        except LakebedError as error:
            if not getattr(error, "retry_after_s", 0.0):  # refused for certain: nobody will ever know these bytes
                await self._context.store.delete(key)
            raise
        if not added:
            await self._context.store.delete(key)
        return self._told(seq, part, present=not added)

    async def delete(self, of: TickId, seq: int) -> bool:
        """Takes a part out before the finalize; False when there is none. Raises Conflict or TooEarly after it."""
        register = register_of(self._context, of)
        dropped = await register.change(lambda now: tick.drop(now, of, seq, now_ms=now_ms(self._context.clock)))
        if dropped is not None:
            await self._context.store.delete(dropped.key)
        return dropped is not None

    async def _read_away(self, chunks: AsyncIterator[bytes]) -> None:
        size = 0
        async for chunk in chunks:
            size += len(chunk)
            if size > self._settings.part_bytes_max:
                raise _too_large(self._settings.part_bytes_max)

    def _told(self, seq: int, part: Part, *, present: bool) -> Stored:
        self._parts.labels(outcome="already_present" if present else "stored").inc()
        if not present:
            self._bytes.inc(part.size_bytes)
        return Stored(seq, part.sha256, part.size_bytes, present)


class _Meter:
    """Counts and hashes what streams through; raises at the end, before the upload is complete, if it is not right."""

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
                hint="send it again",
                error_class="sha_mismatch",
                received_sha256=digest.hexdigest(),
            )


def _too_large(bytes_max: int) -> TooLarge:
    return TooLarge(f"the part is larger than {bytes_max} bytes", hint="make smaller parts", limit_bytes=bytes_max)
