"""Checks what clients of several brokers saw, in the manner of Jepsen's kafka workload. Pure.

A history is a list of sends and polls as clients recorded them. Every anomaly is named, with the operations that show
it; an empty list means that this history is one a correct log can produce.

- lost write: a record was acknowledged, a later one was seen, and no complete reader found it;
- duplicate: one record at two offsets;
- inconsistent offsets: two records at one offset;
- aborted read: a record that was refused for certain is read;
- reorder: one client's acknowledged sends, one after another, have offsets that do not grow;
- nonmonotonic poll: inside one poll, or from one poll to the next of a client that did not seek, offsets go back;
- skipped: between two polls of a client that did not seek, records that exist were passed over;
- unseen: an acknowledged record at the end that a final read to the end did not give.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec


class Send(msgspec.Struct, frozen=True, tag="send"):
    """`offset` where it was acknowledged. `info`: the outcome is unknown."""

    client: str
    partition: str
    record: str
    outcome: Literal["ok", "fail", "info"]
    offset: int | None = None


class Poll(msgspec.Struct, frozen=True, tag="poll"):
    """Offsets and records in the order given. `seek`: the client chose a new place before this poll."""

    client: str
    partition: str
    records: Sequence[tuple[int, str]]
    seek: bool = False
    final: bool = False


class Anomaly(msgspec.Struct, frozen=True):
    kind: str
    partition: str
    detail: str


Operation = Send | Poll


def check(history: Sequence[Operation]) -> list[Anomaly]:
    """Every anomaly of the history, partition by partition."""
    by_partition: dict[str, list[Operation]] = defaultdict(list)
    for operation in history:
        by_partition[operation.partition].append(operation)
    return [anomaly for name, operations in sorted(by_partition.items()) for anomaly in _partition(name, operations)]


def _partition(name: str, operations: Sequence[Operation]) -> Iterable[Anomaly]:
    sends = [operation for operation in operations if isinstance(operation, Send)]
    polls = [operation for operation in operations if isinstance(operation, Poll)]
    at: dict[int, set[str]] = defaultdict(set)
    where: dict[str, set[int]] = defaultdict(set)
    for offset, record in [
        *[(send.offset, send.record) for send in sends if send.outcome == "ok" and send.offset is not None],
        *[pair for poll in polls for pair in poll.records],
    ]:
        at[offset].add(record)
        where[record].add(offset)
    for offset, records in sorted(at.items()):
        if len(records) > 1:
            yield Anomaly("inconsistent offsets", name, f"offset {offset} is {sorted(records)}")
    for record, offsets in sorted(where.items()):
        if len(offsets) > 1:
            yield Anomaly("duplicate", name, f"{record} is at {sorted(offsets)}")
    yield from _lost(name, sends, polls)
    yield from _order(name, sends)
    yield from _polls(name, polls, sorted(at))


def _lost(name: str, sends: Sequence[Send], polls: Sequence[Poll]) -> Iterable[Anomaly]:
    seen = {record for poll in polls for _, record in poll.records}
    final = {record for poll in polls if poll.final for _, record in poll.records}
    complete = any(poll.final for poll in polls)
    last = max((offset for poll in polls for offset, _ in poll.records), default=0)
    for send in sends:
        if send.outcome == "fail" and send.record in seen:
            yield Anomaly("aborted read", name, f"{send.record} was refused to {send.client}, and is read")
        if send.outcome != "ok" or send.offset is None or not complete or send.record in final:
            continue
        kind = "lost write" if send.offset <= last else "unseen"
        yield Anomaly(kind, name, f"{send.record} was acknowledged at {send.offset} to {send.client}, and is not there")


def _order(name: str, sends: Sequence[Send]) -> Iterable[Anomaly]:
    before: dict[str, Send] = {}
    for send in sends:
        if send.outcome != "ok" or send.offset is None:
            continue
        earlier = before.get(send.client)
        if earlier is not None and earlier.offset is not None and earlier.offset >= send.offset:
            yield Anomaly(
                "reorder",
                name,
                f"{send.client} sent {earlier.record} then {send.record}: offsets {earlier.offset}, {send.offset}",
            )
        before[send.client] = send


def _polls(name: str, polls: Sequence[Poll], existing: Sequence[int]) -> Iterable[Anomaly]:
    reached: dict[str, int] = {}
    for poll in polls:
        if poll.seek:
            reached.pop(poll.client, None)
        for offset, record in poll.records:
            last = reached.get(poll.client)
            if last is not None and offset <= last:
                yield Anomaly("nonmonotonic poll", name, f"{poll.client} got {record} at {offset} after {last}")
            elif last is not None:
                passed = existing[bisect_right(existing, last) : bisect_left(existing, offset)]
                if passed:
                    yield Anomaly("skipped", name, f"{poll.client} went from {last} to {offset} past {passed[:5]}")
            reached[poll.client] = offset
