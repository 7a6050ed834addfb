"""Merges chunks as they age: the chunks of a settled day into one per window and metric, the days of a month into one.

A merged chunk is a copy: its rows are those of the chunks it was made from, added up exactly. `MergedSpans` says which
spans have one, and through which generation. Before a generation is committed, the spans that it touches are taken out,
so a span that is listed lacks nothing that is committed. A reader reads the spans before and after the state of the
roller, and uses those that are the same: see `RollupCoverage.usable`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from lakebed.batches.model import write_record
from lakebed.batches.paths import HOUR_NS, day_ns
from lakebed.core.errors import AlreadyExists, Corrupt, Invalid, NotFound
from lakebed.core.feed import ahead
from lakebed.core.logs import logger
from lakebed.rollups import paths
from lakebed.rollups.aggregate import CHUNK_ROWS_MAX
from lakebed.rollups.codec.chunk import decode_rollup, encode_rollup, rows_in, table_of
from lakebed.rollups.codec.windows import SECOND_NS, merged, row_keys
from lakebed.rollups.model import MergedChunks, MergedSpans, RollupState
from lakebed.store.model import read_record
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime

SPANS_PER_RUN = 8  # days or months merged in one run; the rest waits for the next

log = logger("batches")


def merged_register(runtime: StoreRuntime) -> Register[MergedSpans]:
    return Register(runtime, paths.ROLLER_MERGED, MergedSpans, MergedSpans(), name="merged")


def touched(keys: Iterable[str]) -> set[str]:
    """The days and months that these rollup chunks belong to."""
    days = {key.split("/")[3] for key in keys if key.startswith(paths.ROLLUP)}
    return days | {month_of(day) for day in days}


def month_of(day: str) -> str:
    return f"month={day.removeprefix('date=')[:7]}"


class ChunkMerger:
    """Run by the roller, under its lease: `epoch` fences earlier ones."""

    def __init__(self, runtime: StoreRuntime, *, windows_s: tuple[int, ...]) -> None:
        self._store, self._windows_s = runtime.store, windows_s
        self.spans = merged_register(runtime)

    async def release(self, keys: Iterable[str], epoch: int) -> None:
        """Takes out the spans of chunks that are about to be committed."""
        gone = touched(keys)
        if gone & (await self.spans.read()).value.through.keys():
            await self.spans.change(lambda at: (at.without(gone), None), epoch=epoch)

    async def release_before(self, end_ns: int, epoch: int) -> None:
        """Takes out the spans whose first day ends up to then: their chunks are about to be removed.

        The rest of a month is read by its days.
        """
        spans = (await self.spans.read()).value.through
        gone = {span for span in spans if _ends_ns(paths.first_day(span)) <= end_ns}
        if gone:
            await self.spans.change(lambda at: (at.without(gone), None), epoch=epoch)

    async def merge(self, state: RollupState, epoch: int, removed_ns: int = 0) -> int:
        """Merges days and months before what is settled; returns how many spans. A month of which retention has removed
        days is not merged: it would keep what is to go next."""
        held = (await self.spans.read()).value
        days = [day for day in await self._days() if _ends_ns(day) <= state.settled_ns]
        done = 0
        for day in days:
            if done < SPANS_PER_RUN and day not in held.usable:
                done += await self._day(day, state, epoch)
        held = (await self.spans.read()).value
        for month in sorted({month_of(day) for day in days}):
            mine = [day for day in days if month_of(day) == month]
            ready = month not in held.usable and all(day in held.usable for day in mine)
            ready = ready and _ends_ns(paths.first_day(month)) > removed_ns
            if ready and done < SPANS_PER_RUN and _month_ends_ns(month) <= state.settled_ns:
                done += await self._month(month, mine, held, epoch)
        return done

    async def _days(self) -> list[str]:
        return sorted(await self._store.children(f"{paths.ROLLUP}window={min(self._windows_s)}s/"))

    async def _day(self, day: str, state: RollupState, epoch: int) -> int:
        made = True
        for window_s in self._windows_s:
            folders: dict[str, list[str]] = {}
            async for info in self._store.list(f"{paths.ROLLUP}window={window_s}s/{day}/"):
                try:
                    if state.counts(paths.sequence_of_chunk(info.key)):
                        folders.setdefault(info.key.split("/")[5], []).append(info.key)
                except Invalid:
                    continue  # not ours
            try:
                made = made and await self._all(window_s, day, folders, state.committed)
            except (Invalid, NotFound) as error:
                log.warning("chunks are not merged: one cannot be read", span=day, error=error.message)
                return 0
        if made:
            await self.spans.change(lambda at: (at.with_span(day, state.committed), None), epoch=epoch)
        return int(made)

    async def _month(self, month: str, days: list[str], held: MergedSpans, epoch: int) -> int:
        through, made = max(held.through[day] for day in days), True
        for window_s in self._windows_s:
            folders: dict[str, list[str]] = {}
            try:
                for day in days:
                    for metric, keys in (await self._merged(window_s, day, held.through[day])).items():
                        folders.setdefault(metric, []).extend(keys)
                made = made and await self._all(window_s, month, folders, through)
            except (Invalid, NotFound, Corrupt) as error:  # merged again, from chunks that are still there
                log.warning("days are merged again: a chunk cannot be read", span=month, error=error.message)
                await self.spans.change(lambda at: (at.without(set(days)), None), epoch=epoch)
                return 0
        if made:
            await self.spans.change(lambda at: (at.with_span(month, through), None), epoch=epoch)
        return int(made)

    async def _merged(self, window_s: int, span: str, through: int) -> dict[str, list[str]]:
        """The merged chunks of a span by metric, as its list says."""
        folder = paths.merged_folder(window_s, span)
        found = read_record(await self._store.get(paths.merged_list_key(folder, through)), MergedChunks)
        return {metric: found.keys(folder, through, metric) for metric in found.chunks}

    async def _all(self, window_s: int, span: str, folders: dict[str, list[str]], through: int) -> bool:
        """Merges each metric's chunks and lists them; False when another version of this code did, otherwise.

        Raises Invalid or NotFound when a chunk cannot be read.
        """
        folder, listed = paths.merged_folder(window_s, span), dict[str, tuple[str, int]]()
        for metric, keys in sorted(folders.items()):
            tables = [table async for table in ahead(sorted(keys), self._read)]
            digest = hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()[:32]
            made = merged_chunks(tables, window_s)
            listed[metric] = (digest, len(made))
            for part, data in enumerate(made):
                if not await self._create(paths.merged_key(folder, metric, through, digest, part), data):
                    return False
        record = write_record(MergedChunks("lightmetrics.rollup_merged.v1", listed))
        return await self._create(paths.merged_list_key(folder, through), record)

    async def _create(self, key: str, data: bytes) -> bool:
        """False when other bytes are there: made by another version of this code, or of chunks that are lost now."""
        try:
            await self._store.create(key, data)
        except AlreadyExists:
            return False
        return True

    async def _read(self, key: str) -> Any:
        return decode_rollup((await self._store.get(key)).data)


def merged_chunks(tables: list[Any], window_s: int) -> list[bytes]:
    """The rows of these chunks of one metric and window, added up, as chunks."""
    import pyarrow as pa

    table = pa.concat_tables(tables).combine_chunks()
    if not table.num_rows:
        return []
    agents, labels = table["agent_id"].chunk(0), table["labels"].chunk(0)
    keys = row_keys(agents, labels).dictionary_encode()
    names = keys.dictionary.to_pylist()
    order = np.argsort(np.array(names, object), kind="stable")
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    codes = ranks[keys.indices.to_numpy()]
    _, firsts = np.unique(codes, return_index=True)
    rows = merged(rows_in(table, codes), window_s * SECOND_NS)
    of_agents, of_labels = agents.take(pa.array(firsts)), labels.take(pa.array(firsts))
    return [
        encode_rollup(table_of(rows.take(np.arange(at, min(len(rows), at + CHUNK_ROWS_MAX))), of_agents, of_labels))
        for at in range(0, len(rows), CHUNK_ROWS_MAX)
    ]


def _ends_ns(day: str) -> int:
    try:
        return day_ns(day) + 24 * HOUR_NS
    except Invalid:
        return 2**63 - 1  # not ours


def _month_ends_ns(month: str) -> int:
    first = datetime.strptime(month, "month=%Y-%m").replace(tzinfo=UTC)
    return int((first + timedelta(days=32)).replace(day=1).timestamp()) * 1_000_000_000
