"""Agents and recently accepted batches, computed from the newest entries of the by-time index alone.

A busy hour may hold millions of entries, so it is listed from its end: the last minute, the last ten, then the hour,
and never more than LISTED_MAX keys of it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import msgspec

from lakebed.batches import paths
from lakebed.batches.conflicts import ConflictReview, ConflictView
from lakebed.batches.model import AcceptedByTime
from lakebed.batches.reader import RawBatches
from lakebed.core.context import Context
from lakebed.core.errors import Invalid
from lakebed.store.runtime import StoreRuntime

NEWEST_MAX = 200  # batches looked at
LISTED_MAX = 5000  # keys listed for one look
HOURS_MAX = 3  # hour folders looked into
STEPS_NS = (60 * 10**9, 600 * 10**9, paths.HOUR_NS)
AGENTS_MAX = 500
KNOWN_MAX = 2000  # entries kept: they never change
CONFLICTS_MAX = 100


class AcceptedRow(msgspec.Struct, frozen=True):
    agent_id: str
    boot_id: str
    seq_start: int
    seq_end: int
    samples: int
    frame_bytes: int
    accepted_at_unix_ns: int
    delay_s: float
    frame_sha256: str


class AgentRow(msgspec.Struct, frozen=True):
    """An agent, by its newest batches; zeros for one that none of them is of. `delay_s`: last sample to acceptance."""

    agent_id: str
    boot_id: str = ""
    batches: int = 0
    samples: int = 0
    frame_bytes: int = 0
    last_seq: int = 0
    last_accepted_at_unix_ns: int = 0
    delay_s: float = 0.0


class RecentBatches:
    """Looks at the newest batches of a bucket; what it has read once it does not read again."""

    def __init__(self, runtime: StoreRuntime) -> None:
        store, clock = runtime.store, runtime.clock
        self._store, self._clock = store, clock
        self._raw = RawBatches(store, cache_bytes_max=0)
        self._known: OrderedDict[str, AcceptedByTime] = OrderedDict()

    async def newest(self, limit: int = NEWEST_MAX) -> list[AcceptedRow]:
        """The newest accepted batches, newest first."""
        keys = await self._newest_keys(limit)
        entries = await asyncio.gather(*map(self._entry, keys))
        return [_row(entry) for entry in entries if entry is not None]

    async def agents(self, limit: int = NEWEST_MAX) -> list[AgentRow]:
        """Every agent that ever had a batch accepted, those heard last first."""
        rows: dict[str, AgentRow] = {}
        for batch in await self.newest(limit):
            known = rows.get(batch.agent_id)
            if known is None:
                known = AgentRow(
                    batch.agent_id,
                    batch.boot_id,
                    last_seq=batch.seq_end,
                    last_accepted_at_unix_ns=batch.accepted_at_unix_ns,
                    delay_s=batch.delay_s,
                )
            rows[batch.agent_id] = msgspec.structs.replace(
                known,
                batches=known.batches + 1,
                samples=known.samples + batch.samples,
                frame_bytes=known.frame_bytes + batch.frame_bytes,
            )
        for folder in (await self._store.children(paths.ACCEPTED))[:AGENTS_MAX]:
            try:
                agent_id = bytes.fromhex(folder.removeprefix("agent=")).decode()
            except ValueError:
                continue  # not ours; the audit reports it
            rows.setdefault(agent_id, AgentRow(agent_id))
        return list(rows.values())

    async def _newest_keys(self, limit: int) -> list[str]:
        found: list[str] = []
        hours = 0
        for date in reversed(await self._store.children(paths.ACCEPTED_BY_TIME)):
            for hour in reversed(await self._store.children(f"{paths.ACCEPTED_BY_TIME}{date}/")):
                found += await self._of_hour(f"{paths.ACCEPTED_BY_TIME}{date}/{hour}/", date, hour, limit - len(found))
                hours += 1
                if len(found) >= limit or hours >= HOURS_MAX:
                    return found
        return found

    async def _of_hour(self, folder: str, date: str, hour: str, limit: int) -> list[str]:
        try:
            begin_ns = paths.day_ns(date) + int(hour.removeprefix("hour=")) * paths.HOUR_NS
        except (Invalid, ValueError):
            return []
        end_ns = min(begin_ns + paths.HOUR_NS, self._clock.now_ns())
        keys: list[str] = []
        for step_ns in STEPS_NS:
            after = f"{folder}{max(begin_ns, end_ns - step_ns):020d}" if step_ns < paths.HOUR_NS else ""
            keys = []
            async for info in self._store.list(folder, after=after):
                keys.append(info.key)
                if len(keys) >= LISTED_MAX:
                    break
            if len(keys) >= limit:
                break
        return keys[::-1][:limit]

    async def _entry(self, key: str) -> AcceptedByTime | None:
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        entry = await self._raw.entry(key)
        if entry is not None:
            self._known[key] = entry
            while len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
        return entry


async def conflicts(
    context: Context, *, limit: int = CONFLICTS_MAX, after: str = "", open_only: bool = False
) -> list[ConflictView]:
    return await ConflictReview(context).list(limit=limit, after=after, open_only=open_only)


def _row(entry: AcceptedByTime) -> AcceptedRow:
    identity = paths.identity_of(entry.accepted_manifest_key)
    return AcceptedRow(
        identity.agent_id,
        identity.boot_id,
        identity.seq_start,
        identity.seq_end,
        entry.samples,
        entry.frame_bytes,
        entry.accepted_at_unix_ns,
        round((entry.accepted_at_unix_ns - entry.last_time_unix_ns) / 1e9, 3),
        entry.frame_sha256,
    )
