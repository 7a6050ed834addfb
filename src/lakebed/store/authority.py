"""The identity of a bucket: a generated authority id for each bucket and prefix, with the name of the bucket.

Two buckets that replicate each other would both accept the same batch. Replication copies the authority object, so it
names its bucket: in a bucket of another name a process refuses to start, and also with another id than it expects.
"""

from __future__ import annotations

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, Conflict, NotFound
from lakebed.store.model import read_record
from lakebed.store.runtime import StoreRuntime

AUTHORITY_KEY = "lakebed/authority.json"


class Authority(msgspec.Struct, frozen=True):
    schema: str
    authority_id: str
    created_at_ms: int
    location: str = ""  # the bucket that it was created in; empty in authorities of earlier versions


async def claim(runtime: StoreRuntime, *, expected: str, location: str = "", moved_from: str = "") -> Authority:
    """The authority of this bucket, created on first use. Raises Conflict when it is not the `expected` one, or was
    created in another bucket than `location`, unless the lake was moved from there."""
    try:
        found = read_record(await runtime.store.get(AUTHORITY_KEY), Authority)
    except NotFound:
        found = await _create(runtime, expected or runtime.ids.uuid(), location)
    if expected and found.authority_id != expected:
        raise Conflict(
            f"the authority of this bucket is {found.authority_id}, but store.authority is {expected}",
            hint="correct store.url and store.prefix, or store.authority",
            found=found.authority_id,
            expected=expected,
        )
    former = {each.strip().rstrip("/") for each in moved_from.split(",")}
    if location and found.location and found.location != location and found.location not in former:
        raise Conflict(
            f"this bucket is a copy: its authority object was created in {found.location}, and store.url is {location}",
            hint="two buckets must not accept the same batches. Use the original; or, if it is gone for good, set "
            f"store.moved_from = {found.location}",
            found=found.location,
            expected=location,
        )
    return found


async def _create(runtime: StoreRuntime, authority_id: str, location: str) -> Authority:
    made = Authority("lakebed.authority.v1", authority_id, now_ms(runtime.clock), location)
    try:
        await runtime.store.create(AUTHORITY_KEY, msgspec.json.encode(made))
    except AlreadyExists as error:
        return read_record(error.current, Authority)
    return made
