"""Queues for the CLI and the console: status, waiting batches and their collectors, dead letters, stored objects."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from lakebed.core.auth import Shows, every_name
from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, LakebedError, NotFound
from lakebed.core.payload import Payload, payload
from lakebed.queue import codec
from lakebed.queue.model import DeadLetter, KeyValueEntry, QueueStatus
from lakebed.queue.roles import Queue, queue_names
from lakebed.queue.settings import QueueSettings

QUEUES_MAX = 100
WAITING_MAX = 60
LETTERS_MAX = 50
ENTRIES_MAX = 20
SEARCHED_MAX = 2000  # batches among which one is looked for; the page lists fewer
BATCH_BYTES_MAX = 32 * 1024 * 1024  # a larger batch is not decoded


class WaitingRow(msgspec.Struct, frozen=True):
    """A batch that is not done. `held_by` is the collector that claimed it, or empty."""

    sequence: int
    location: str
    bytes: int
    entries: int
    age_s: float
    held_by: str
    claimed_s: float | None
    rejections: int
    trouble: str


class EntryRow(msgspec.Struct, frozen=True):
    key: Payload
    value: Payload


class BatchPage(msgspec.Struct, frozen=True):
    location: str
    entries: int
    shown: list[EntryRow]


async def statuses(context: Context, queue: str = "", *, shows: Shows = every_name) -> list[QueueStatus]:
    """The status of each queue that it `shows`, up to a limit, or of one."""
    found = [queue] if queue else await queue_names(context.store, context.settings.of(QueueSettings))
    return [await Queue.of(context, name).status() for name in list(filter(shows, found))[:QUEUES_MAX]]


async def enqueued(context: Context) -> tuple[int, int]:
    """Batches ever enqueued, and those of them that are done, from the producer manifests of all queues."""
    total = done = 0
    for name in (await queue_names(context.store, context.settings.of(QueueSettings)))[:QUEUES_MAX]:
        for shard in await Queue.of(context, name).shards():
            head = await shard.producer.read()
            total += head.next_sequence - 1
            done += max(0, head.next_sequence - 1 - head.waiting)
    return total, done


async def waiting(context: Context, name: str, *, limit: int = WAITING_MAX) -> list[WaitingRow]:
    """The next batches in order, without claiming or opening them."""
    queue, now = Queue.of(context, name), now_ms(context.clock)
    consumers = [await shard.consumer.read() for shard in await queue.shards()]
    claims = {place: claim for one in consumers for place, claim in one.claims.items()}
    troubles = {place: trouble for one in consumers for place, trouble in one.troubles.items()}
    rows: list[WaitingRow] = []
    async for location, pending, holder in queue.waiting():
        claim, trouble = claims.get(location), troubles.get(location)
        rows.append(
            WaitingRow(
                sequence=pending.sequence,
                location=location,
                bytes=pending.size_bytes,
                entries=pending.count,
                age_s=max(0.0, (now - pending.enqueued_ms) / 1000) if pending.enqueued_ms else 0.0,
                held_by=holder,
                claimed_s=max(0.0, (now - claim.since_ms) / 1000) if claim and holder else None,
                rejections=trouble.count if trouble else 0,
                trouble=trouble.reason if trouble else "",
            )
        )
        if len(rows) >= limit:
            break
    return rows


async def peek(context: Context, name: str, *, count: int, entries: int) -> list[dict[str, Any]]:
    """The next batches with their first entries, without claiming them."""
    queue = Queue.of(context, name)
    rows: list[dict[str, Any]] = []
    async for location, pending, holder in queue.waiting():
        if len(rows) >= count:
            break
        row = {"sequence": pending.sequence, "location": location, "bytes": pending.size_bytes, "held_by": holder}
        try:
            found = dump(location, (await queue.store.get(location)).data)
            row |= {"entries": found["count"], "first": found["entries"][:entries]}
        except LakebedError as error:
            row |= {"entries": None, "first": [f"{error.code}: {error.message}"]}
        rows.append(row)
    return rows


async def letters(context: Context, name: str, *, limit: int = LETTERS_MAX) -> list[DeadLetter]:
    """Dead letters, oldest first."""
    found: list[DeadLetter] = []
    async for letter in Queue.of(context, name).letters():
        found.append(letter)
        if len(found) >= limit:
            break
    return found


async def batch(context: Context, name: str, location: str) -> BatchPage:
    """The first entries of one batch that waits or is a dead letter. Raises NotFound, Corrupt."""
    queue = Queue.of(context, name)
    known = {row.location for row in await waiting(context, name, limit=SEARCHED_MAX)}
    if location not in known | {letter.location for letter in await letters(context, name)}:
        raise NotFound(f"queue {name} has no batch {location[:200]!r}", hint="it may be done by now")
    stored = await queue.store.get(location)
    found = codec.decode(stored.data, bytes_max=BATCH_BYTES_MAX)
    shown = [EntryRow(payload(entry.key), payload(entry.value)) for entry in found[:ENTRIES_MAX]]
    return BatchPage(location, len(found), shown)


def dump(key: str, data: bytes) -> dict[str, Any]:
    """A batch as its entries, a manifest or a dead letter as it is. Raises Corrupt with the first bytes otherwise."""
    if data[:1] == b"{":
        try:
            return {"key": key, "kind": "json", "bytes": len(data), "object": msgspec.json.decode(data)}
        except msgspec.DecodeError as error:
            raise Corrupt(f"{key!r} is not JSON: {error}; its first bytes are {data[:32]!r}") from error
    try:
        entries = codec.decode(data)
    except Corrupt as error:
        raise Corrupt(f"{key!r}: {error.message}; its first bytes are {data[:32]!r}", hint=error.hint) from error
    form = "json batch" if data[:1] == b"[" else "binary batch"
    return {
        "key": key,
        "kind": form,
        "bytes": len(data),
        "count": len(entries),
        "entries": [shown(entry) for entry in entries],
    }


def shown(entry: KeyValueEntry) -> dict[str, str]:
    """An entry as text where it is text; other bytes as base64 under another name."""
    return _side("key", entry.key) | _side("value", entry.value)


def _side(name: str, data: bytes) -> dict[str, str]:
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}
