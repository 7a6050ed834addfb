"""Late samples: batches whose index row was written after a reader may have passed their hour.

Whoever writes such a row, a collector after an outage or the reconciler, writes a note under `rollup-work/v1/` first.
Each run of the roller takes the notes since the last one and makes new chunks of the same hours in a new generation, so
a query adds them up; until then it reads these batches themselves. Batches that could not be read before are looked for
again in the same way.
"""

from __future__ import annotations

from lakebed.batches.paths import parse_by_time
from lakebed.core.errors import Invalid
from lakebed.rollups import paths
from lakebed.rollups.model import RollupState
from lakebed.store.protocol import Store

LATE_MAX = 10_000  # notes of batches out of order that are looked at in one go; the rest waits for the next


async def late_batches(store: Store, state: RollupState) -> tuple[list[str], int | None]:
    """Manifest ids that came out of order: noted since the last processed notes, or unreadable before.

    With them, when the first note that was left out was stored; None when these are all. The oldest notes come first,
    and those of one instant stay together, so that each look gets further. Other readers use the notes too, so they are
    not deleted here.
    """
    noted = sorted(
        [
            (info.modified_ms, info.key)
            async for info in store.list(paths.ROLLUP_WORK)
            if info.modified_ms >= state.notes_ms
        ]
    )
    count = min(LATE_MAX, len(noted))
    while 0 < count < len(noted) and noted[count][0] == noted[count - 1][0]:
        count += 1
    unreadable = [info.key async for info in store.list(paths.ROLLER_UNREADABLE)]
    ids = set()
    for key in [*[key for _, key in noted[:count]], *unreadable[:LATE_MAX]]:
        try:
            ids.add(parse_by_time(key)[0])
        except Invalid:
            continue  # not ours
    return sorted(ids), noted[count][0] if count < len(noted) else None
