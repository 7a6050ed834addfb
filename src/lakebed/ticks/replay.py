"""Replays a committed tick with corrected parts: a new attempt, under an id of its own, beside the first.

The first attempt's commit record never changes, and its rows stay readable at the table's version in that record. The
new attempt `<tick>.r2` (then `.r3`, …) is an ordinary tick: its rows replace those with the same keys, it has its own
commit record and message, and silver gets it like any other.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec

from lakebed.core import private
from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import NotFound
from lakebed.store.runtime import StoreRuntime
from lakebed.ticks import paths
from lakebed.ticks.finalizer import iso
from lakebed.ticks.model import Manifest, TickId
from lakebed.ticks.receiver import recorded, register_of

_ATTEMPT = re.compile(r"(?P<tick>.+)\.r(?P<number>[2-9]|[1-9]\d{1,5})")


class TickAttempt(msgspec.Struct, frozen=True):
    """The next attempt of a tick, and the manifest of its first one while its state is kept."""

    of: TickId
    attempt_id: str
    manifest: Manifest | None = None

    @property
    def keys(self) -> dict[str, list[str]]:
        """The primary keys of the first attempt's tables."""
        tables = self.manifest.tables if self.manifest else ()
        return {table.name: list(table.primary_keys) for table in tables}


def first_of(tick_id: str) -> str:
    """The tick that an attempt replays; a tick itself otherwise."""
    found = _ATTEMPT.fullmatch(tick_id)
    return found["tick"] if found else tick_id


async def next_attempt(context: Context, of: TickId) -> TickAttempt:
    """The attempt that a replay makes now. Raises NotFound for a tick that is not committed."""
    of = TickId(of.org_id, of.project_id, first_of(of.tick_id))
    if await recorded(context.store, of) is None:
        raise NotFound(f"no tick {of.tick_id} is committed in {of.org_id}/{of.project_id}", hint="lakebed ticks list")
    number = 1 + max([1, *[int(found["number"]) for found in await _attempts(context, of)]])
    held = (await register_of(context, of).read()).value.manifest
    manifest = msgspec.convert(held, Manifest) if held is not None else None
    return TickAttempt(of, paths.check_name("tick", f"{of.tick_id}.r{number}"), manifest)


async def _attempts(context: StoreRuntime, of: TickId) -> list[re.Match[str]]:
    folder = paths.commit(of).rpartition("/")[0] + "/"
    found, begin = [], f"{folder}{of.tick_id}.r"
    async for info in context.store.list(folder, after=begin):
        if not info.key.startswith(begin):
            break
        attempt = _ATTEMPT.fullmatch(info.key.removeprefix(folder).removesuffix(".json"))
        if attempt is not None and attempt["tick"] == of.tick_id:
            found.append(attempt)
    return found


async def note_replay(context: Context, attempt: TickAttempt, reason: str) -> None:
    """Keeps who replays the tick, and why, before anything is sent."""
    note = {"at": iso(now_ms(context.clock)), "by": context.node, "reason": reason, "attempt": attempt.attempt_id}
    key = f"{paths.REPLAYS}/{attempt.of.path}/{now_ms(context.clock)}-{context.ids.token()}.json"
    await context.store.create(key, msgspec.json.encode(note))


async def stored_parts(context: Context, attempt: TickAttempt, folder: Path) -> list[Path]:
    """The first attempt's parts as files in this folder, while they are kept. Raises NotFound."""
    state = (await register_of(context, attempt.of).read()).value
    if attempt.manifest is None or not state.parts:
        raise NotFound(f"the parts of {attempt.of.tick_id} are not kept any more", hint="give the corrected files")
    await asyncio.to_thread(private.folder, folder)
    made = []
    for table in attempt.manifest.tables:
        for part in table.parquets:
            file = folder / f"{table.name}_seq={part.file_seq:06d}.parquet"
            stored = await context.store.get(state.parts[str(part.file_seq)].key)
            await asyncio.to_thread(private.create, file)
            await asyncio.to_thread(file.write_bytes, stored.data)
            made.append(file)
    return made
