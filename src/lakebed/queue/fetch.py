"""Reads a stored batch: whole, decoded, without blocking the event loop."""

from __future__ import annotations

import asyncio
from functools import partial

from lakebed.queue import codec
from lakebed.queue.model import KeyValueEntry, ShortRead
from lakebed.store.protocol import Store


async def fetch(store: Store, location: str, *, size_bytes: int = 0, bytes_max: int) -> list[KeyValueEntry]:
    """The entries at the location. Raises NotFound, Corrupt, or ShortRead when fewer bytes arrived than were stored."""
    data = (await store.get(location)).data
    if len(data) < size_bytes:  # only what was received whole may be called corrupt
        raise ShortRead(f"{location!r} was read up to byte {len(data)} of {size_bytes}")
    decode = partial(codec.decode, data, bytes_max=bytes_max)
    return await asyncio.to_thread(decode) if len(data) > codec.APART_BYTES else decode()
