"""Agents and recently accepted batches, computed from the newest entries of the index alone.

A busy hour may hold millions of entries, so it is read from its end: the last minute, the last ten, then the hour.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from lakebed.batches import paths
from lakebed.batches.conflicts import ConflictReview, ConflictView
from lakebed.batches.incremental import checked_through_ns
from lakebed.batches.matchers import query_labels
from lakebed.batches.model import AcceptedBatch, AcceptedByTime, BatchIdentity, SampleColumns, check_identity
from lakebed.batches.reader import RawBatches
from lakebed.core.auth import Shows, every_name
from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, Invalid, NotFound
from lakebed.store.runtime import StoreRuntime

NEWEST_MAX = 200  # batches looked at
HOURS_MAX = 3  # hour folders looked into
AGENTS_MAX = 500
SERIES_MAX = 100  # listed of one batch
COUNTED_MAX = 64  # entries read to count the samples of a span
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


class SeriesOfBatch(msgspec.Struct, frozen=True):
    """One series of a batch. `match` selects it in a query."""

    metric: str
    match: str
    samples: int
    first_time_ns: int
    last_time_ns: int
    last: float


class BatchDetail(msgspec.Struct, frozen=True):
    """One accepted batch: its manifest, and what is in its frame. `error`: the frame cannot be read, and why."""

    agent_id: str
    manifest: AcceptedBatch
    series: list[SeriesOfBatch]
    series_count: int
    error: str = ""


class RecentBatches:
    """Looks at the newest batches of a bucket; what it has read once it does not read again."""

    def __init__(self, runtime: StoreRuntime) -> None:
        store, clock = runtime.store, runtime.clock
        self._store, self._clock = store, clock
        self._raw = RawBatches(store, cache_bytes_max=0)
        self._known: OrderedDict[str, AcceptedByTime] = OrderedDict()

    async def newest(self, limit: int = NEWEST_MAX) -> list[AcceptedRow]:
        """The newest accepted batches, newest first."""
        return [_row(entry) for entry in await self.newest_entries(limit)]

    async def newest_entries(self, limit: int) -> list[AcceptedByTime]:
        """The same, as the index has them: with the places of their frames."""
        found = await self._raw.index.newest(limit, hours_max=HOURS_MAX, now_ns=self._clock.now_ns())
        single = [each.manifest_id for each in found if each.entry is None and each.manifest_id not in self._known]
        for name, entry in (await self._raw.find(single)).items():
            self._known[name] = entry
        entries = [each.entry or self._known.get(each.manifest_id) for each in found]
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        return [entry for entry in entries if entry is not None]

    async def agents(self, limit: int = NEWEST_MAX, *, shows: Shows = every_name) -> list[AgentRow]:
        """Every agent that ever had a batch accepted, those heard last first; up to a limit, of those it `shows`."""
        rows: dict[str, AgentRow] = {}
        for batch in [batch for batch in await self.newest(limit) if shows(batch.agent_id)]:
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
        ever = [_agent_of(folder) for folder in await self._store.children(paths.ACCEPTED)]
        for agent_id in [agent for agent in ever if agent and shows(agent)][:AGENTS_MAX]:
            rows.setdefault(agent_id, AgentRow(agent_id))
        return list(rows.values())

    async def detail(self, identity: BatchIdentity) -> BatchDetail:
        """One batch: two requests. Raises NotFound when it was never accepted."""
        try:
            manifest = await self._raw.manifest(identity)
        except NotFound:
            raise NotFound(f"no batch {named(identity)} of {identity.agent_id} is accepted") from None
        try:
            columns = (await self._raw.batch(manifest.frame_sha256, manifest.place)).columns
        except (NotFound, Corrupt) as error:
            return BatchDetail(identity.agent_id, manifest, [], 0, error.message)
        count = len(columns.series_metric)
        shown = [_series_of(columns, number, identity.agent_id) for number in range(min(count, SERIES_MAX))]
        return BatchDetail(identity.agent_id, manifest, shown, count)

    async def accepted_between(self, from_ns: int, to_ns: int) -> tuple[int, int]:
        """Batches and samples accepted in (from_ns, to_ns], by any collector.

        Of single objects, at most COUNTED_MAX are read: behind more, their samples are the mean of those.
        """
        found = [each async for each in self._raw.index.entries(from_ns + 1, to_ns)]
        samples = sum(each.entry.samples for each in found if each.entry is not None)
        single = [each.manifest_id for each in found if each.entry is None]
        read = await self._raw.find(single[:: max(1, -(-len(single) // COUNTED_MAX))])
        mean = sum(entry.samples for entry in read.values()) / len(read) if read else 0.0
        return len(found), samples + round(mean * len(single))


async def agents_heard(context: Context) -> int:
    """How many agents ever had a batch accepted."""
    return len(await context.store.children(paths.ACCEPTED))


async def reconciler_behind_s(context: Context) -> float | None:
    """Now minus the time up to which everything is checked; None when no reconciler ever ran."""
    through_ns = await checked_through_ns(context)
    return max(0.0, (context.clock.now_ns() - through_ns) / 1e9) if through_ns else None


async def conflicts(
    context: Context, *, limit: int = CONFLICTS_MAX, after: str = "", open_only: bool = False
) -> list[ConflictView]:
    return await ConflictReview(context).list(limit=limit, after=after, open_only=open_only)


async def conflicts_shown(context: Context, *, limit: int = CONFLICTS_MAX) -> list[ConflictView]:
    """Those to decide first, then decided ones: a new one is not hidden behind what was decided long ago."""
    undecided = await conflicts(context, limit=limit, open_only=True)
    decided = [view for view in await conflicts(context, limit=limit) if view.resolution is not None]
    return [*undecided, *decided][:limit]


def named(identity: BatchIdentity) -> str:
    """A batch of an agent, for an address."""
    return f"{identity.boot_id}/{identity.seq_start}-{identity.seq_end}"


def identity_named(agent_id: str, name: str) -> BatchIdentity:
    """The reverse of `named`. Raises Invalid."""
    boot_id, _, numbers = name.rpartition("/")
    start, _, end = numbers.partition("-")
    if not (start.isdecimal() and end.isdecimal()) or len(numbers) > 40:
        raise Invalid(f"{name[:80]!r} names no batch", hint="BOOT/FIRST-LAST, as the page links it")
    return check_identity(BatchIdentity(agent_id, boot_id, int(start), int(end)))


def _series_of(columns: SampleColumns, number: int, agent_id: str) -> SeriesOfBatch:
    rows = (columns.series == number).nonzero()[0]
    times = columns.times_ns[rows]
    labels = query_labels(agent_id, columns.labels(number))
    match = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
    last = float(columns.values[rows[-1]])
    return SeriesOfBatch(columns.metric(number), match, len(rows), int(times.min()), int(times.max()), last)


def _agent_of(folder: str) -> str:
    """The agent of a folder of accepted batches; "" where it is not ours, which the audit reports."""
    try:
        return bytes.fromhex(folder.removeprefix("agent=")).decode()
    except ValueError:
        return ""


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
