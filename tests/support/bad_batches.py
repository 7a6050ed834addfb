"""Every way in which an accepted batch can be bad input, for every job that reads batches."""

from __future__ import annotations

import hashlib

import msgspec

from lakebed.batches import acceptance, paths
from lakebed.batches.codec.frame import decode
from lakebed.batches.model import AcceptedBatch, write_record
from lakebed.store.protocol import Store

# What is done to a batch: the words that every report of it has.
BLOBS = {
    "missing": "missing",
    "half-written": "another hash",
    "wrong hash": "another hash",
    "later format": "not supported by this version",
}
ENTRIES = {"half-written entry": "does not decode", "later entry": "does not decode"}
BAD = BLOBS | ENTRIES


async def spoil(store: Store, accepted: AcceptedBatch, how: str) -> AcceptedBatch:
    """Does that to the batch; gives its manifest, which is another when a newer collector would have written it."""
    key, frame = accepted.raw_blob_key, (await store.get(accepted.raw_blob_key)).data
    entry = entry_key(accepted)
    if how == "missing":
        await store.delete(key)
    elif how == "half-written":
        await put(store, key, frame[:-7])
    elif how == "wrong hash":
        await put(store, key, frame[:-1] + bytes([frame[-1] ^ 1]))
    elif how == "half-written entry":
        await put(store, entry, (await store.get(entry)).data[:-20])
    elif how == "later entry":
        await put(store, entry, (await store.get(entry)).data.replace(b"by_time.v1", b"by_time.v2"))
    else:
        return await _later(store, accepted, frame)
    return accepted


def told_key(accepted: AcceptedBatch, how: str) -> str:
    """The object that cannot be read."""
    return entry_key(accepted) if how in ENTRIES else accepted.raw_blob_key


def entry_key(accepted: AcceptedBatch) -> str:
    return paths.accepted_by_time_key(accepted.identity, accepted.accepted_at_unix_ns)


async def put(store: Store, key: str, data: bytes) -> None:
    await store.delete(key)
    await store.create(key, data)


async def _later(store: Store, accepted: AcceptedBatch, frame: bytes) -> AcceptedBatch:
    """The same batch in a frame of a version to come, accepted under its own hash by anyone who knows it."""
    span = acceptance.span_of(decode(frame))
    await store.delete(accepted.raw_blob_key)
    for write in acceptance.derived(accepted, span):
        await store.delete(write.key)
    to_come = frame[:9] + bytes([99]) + frame[10:]
    sha256 = hashlib.sha256(to_come).hexdigest()
    newer = msgspec.structs.replace(accepted, frame_sha256=sha256, raw_blob_key=paths.blob_key(sha256))
    await put(store, newer.raw_blob_key, to_come)
    await put(store, paths.accepted_key(newer.identity), write_record(newer))
    for write in acceptance.derived(newer, span):
        await put(store, write.key, write.data)
    return newer
