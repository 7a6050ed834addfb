"""Clean-up of a table's log: entries and checkpoints that are older than the table keeps its history.

Delta's own rule, by Delta's own properties: a version older than `delta.logRetentionDuration` (30 days) may go once a
checkpoint stands in for it, so every later version can still be read. `delta.enableExpiredLogCleanup = false` keeps
everything. The time is counted back from the last version that brought rows: a table that rests, and is only swept,
keeps what its writers look back to when they go on. Old checkpoints go before entries, and those oldest first: an
interrupted clean-up leaves no gap.
"""

from __future__ import annotations

from typing import Any

from lakebed.core.clock import Clock, now_ms
from lakebed.core.errors import Corrupt, NotFound
from lakebed.core.logs import logger
from lakebed.delta import history
from lakebed.delta.history import LogListing
from lakebed.delta.log import COPIED, LOG_FOLDER, decode
from lakebed.delta.protocol import LOG_RETENTION_S, check_writable, is_on, seconds
from lakebed.store.protocol import Store

log = logger("tables")

LOOKED_AT = 200  # versions: half a year of a table that only loses rows, once a day
EARLIER = "_lakebed"  # the folder of snapshots that earlier versions of Lakebed kept beside the log


async def expired(store: Store, root: str, *, clock: Clock) -> list[str]:
    """The keys that may be deleted, oldest first: none where the checkpoint that would stand in for them cannot be
    read. Changes nothing. Raises what reading the table raises.
    """
    found = [info.key async for info in store.list(f"{root}/{EARLIER}/")]
    there = await history.listing(store, root)
    if not there.checkpoints:
        return found
    state = await history.snapshot(store, root)
    check_writable(state, root)
    keep_s = seconds(state.properties, "delta.logRetentionDuration", LOG_RETENTION_S)
    if keep_s == float("inf") or not is_on(state.properties, "delta.enableExpiredLogCleanup", True):
        return found
    before_ms = min(now_ms(clock), await _last_rows_ms(store, there)) - int(keep_s * 1000)
    old = [version for version, info in there.entries.items() if info.modified_ms < before_ms]
    base = there.base(max(old, default=-1))
    if base is None:
        return found
    try:
        await history.at_checkpoint(store, root, base)
    except (Corrupt, NotFound) as error:  # what is older is the table then
        log.warning("the log is not cleaned up: a checkpoint cannot be read", table=root, error=error.message)
        return found
    entries = [there.entries[version].key for version in sorted(there.entries) if version < base.version]
    checkpoints = [each for each in there.checkpoints if each.version < base.version]
    return [*found, *(f"{root}/{LOG_FOLDER}/{name}" for each in checkpoints for name in each.names), *entries]


async def _last_rows_ms(store: Store, there: LogListing) -> int:
    """When rows last came, of the last versions; 0 when none of these brought any."""
    for version in sorted(there.entries, reverse=True)[:LOOKED_AT]:
        info = there.entries[version]
        actions = decode((await store.get(info.key)).data, info.key)
        if any(_brings_rows(action["add"]) for action in actions if action.get("add")):
            return info.modified_ms
    return 0


def _brings_rows(add: dict[str, Any]) -> bool:
    """A file that was joined from others, or that is the rest of one, brings none."""
    return add.get("dataChange", True) and COPIED not in (add.get("tags") or {})


async def clean(store: Store, root: str, *, clock: Clock) -> int:
    """Deletes them; gives how many. Idempotent: a log entry's name is never used again."""
    gone = await expired(store, root, clock=clock)
    for key in gone:
        await store.delete(key)
    return len(gone)
