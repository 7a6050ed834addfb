"""The identity of a bucket: a generated authority id for each bucket and prefix.

Two buckets that replicate each other would both accept the same batch; a process that expects another id than the one
in the bucket refuses to start.
"""

from __future__ import annotations

import msgspec

from lakebed.core.clock import Clock, now_ms
from lakebed.core.errors import AlreadyExists, Conflict, Corrupt, NotFound
from lakebed.core.ids import Ids
from lakebed.store.model import StoredObject
from lakebed.store.protocol import Store

AUTHORITY_KEY = "lakebed/authority.json"


class Authority(msgspec.Struct, frozen=True):
    schema: str
    authority_id: str
    created_at_ms: int


async def claim(store: Store, *, expected: str, clock: Clock, ids: Ids) -> Authority:
    """The authority of this bucket, created on first use. Raises Conflict when it is not the `expected` one."""
    try:
        found = decode(await store.get(AUTHORITY_KEY))
    except NotFound:
        found = await _create(store, expected or ids.uuid(), clock)
    if expected and found.authority_id != expected:
        raise Conflict(
            f"the authority of this bucket is {found.authority_id}, but store.authority is {expected}",
            hint="correct store.url and store.prefix, or store.authority",
            found=found.authority_id,
            expected=expected,
        )
    return found


async def _create(store: Store, authority_id: str, clock: Clock) -> Authority:
    made = Authority("lakebed.authority.v1", authority_id, now_ms(clock))
    try:
        await store.create(AUTHORITY_KEY, msgspec.json.encode(made))
    except AlreadyExists as error:
        return decode(error.current)
    return made


def decode(stored: StoredObject) -> Authority:
    try:
        return msgspec.json.decode(stored.data, type=Authority)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Corrupt(f"{AUTHORITY_KEY!r} does not decode: {error}", key=AUTHORITY_KEY) from error
