"""One shard of the bucket's queue, as a value: every step of a message's life. Pure."""

from __future__ import annotations

import msgspec

from lakebed.errors import Overloaded
from lakebed.ticks.queue import Received

SCHEMA = "lakebed.tick-queue.v1"


class Entry(msgspec.Struct, frozen=True):
    """A message at rest or in flight. `receipt` changes with each receive, so that an old one is over."""

    message_id: str
    body: str
    sent_at_ms: int
    visible_at_ms: int
    receive_count: int = 0
    receipt: str = ""


class Shard(msgspec.Struct, frozen=True):
    schema: str = SCHEMA
    entries: tuple[Entry, ...] = ()
    dead: tuple[Entry, ...] = ()


def send(now: Shard, entry: Entry, *, messages_max: int) -> tuple[Shard, None]:
    if len(now.entries) + len(now.dead) >= messages_max:
        raise Overloaded(
            f"{messages_max} messages already wait in this shard", hint="is a dispatcher running? lakebed silver status"
        )
    return msgspec.structs.replace(now, entries=(*now.entries, entry)), None


def receive(
    now: Shard, receipts: tuple[str, ...], *, now_ms: int, hidden_ms: int, receives_max: int
) -> tuple[Shard, list[Received]]:
    """Hands out visible messages, oldest first, one for each receipt; buries those that were received too often."""
    left = list(receipts)
    kept: list[Entry] = []
    dead = list(now.dead)
    taken: list[Received] = []
    for entry in now.entries:
        if entry.visible_at_ms > now_ms:
            kept.append(entry)
        elif entry.receive_count >= receives_max:
            dead.append(msgspec.structs.replace(entry, receipt=""))
        elif left:
            entry = msgspec.structs.replace(
                entry,
                visible_at_ms=now_ms + hidden_ms,
                receive_count=entry.receive_count + 1,
                receipt=left.pop(0),
            )
            kept.append(entry)
            taken.append(look(entry))
        else:
            kept.append(entry)
    if not taken and len(dead) == len(now.dead):
        return now, []
    return msgspec.structs.replace(now, entries=tuple(kept), dead=tuple(dead)), taken


def delete(now: Shard, receipt: str) -> tuple[Shard, None]:
    kept = tuple(entry for entry in now.entries if entry.receipt != receipt)
    return (now if len(kept) == len(now.entries) else msgspec.structs.replace(now, entries=kept)), None


def hide(now: Shard, receipt: str, *, until_ms: int) -> tuple[Shard, None]:
    if all(entry.receipt != receipt for entry in now.entries):
        return now, None
    moved = tuple(
        msgspec.structs.replace(entry, visible_at_ms=until_ms) if entry.receipt == receipt else entry
        for entry in now.entries
    )
    return msgspec.structs.replace(now, entries=moved), None


def redrive(now: Shard, message_ids: frozenset[str], *, now_ms: int) -> tuple[Shard, int]:
    back = [
        msgspec.structs.replace(entry, receive_count=0, receipt="", visible_at_ms=now_ms)
        for entry in now.dead
        if entry.message_id in message_ids
    ]
    if not back:
        return now, 0
    dead = tuple(entry for entry in now.dead if entry.message_id not in message_ids)
    return msgspec.structs.replace(now, entries=(*now.entries, *back), dead=dead), len(back)


def look(entry: Entry) -> Received:
    return Received(entry.message_id, entry.receipt, entry.body, entry.receive_count, entry.sent_at_ms)
