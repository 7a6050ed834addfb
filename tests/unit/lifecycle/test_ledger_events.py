"""The ledger's retention, and the events that its moves publish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from lakebed.core.errors import Unavailable
from lakebed.lifecycle import ledger
from lakebed.lifecycle.events import expiration_events
from lakebed.lifecycle.ledger import LedgerMover, LedgerTable
from lakebed.lifecycle.model import ActionKind, ObjectIdentity
from lakebed.lifecycle.state import LedgerRow
from support.lifecycle_harness import Harness
from support.lifecycle_makers import rule

DAY_NS = 100 * 1_000_000_000  # of the harness


async def lived(**settings: Any) -> Harness:
    world = Harness(**settings)
    await world.policy("b", rule(rule_id="r", expiration_days=1))
    return world


async def expire_one(world: Harness, key: str, mover: LedgerMover) -> None:
    world.lake.write("b", key)
    await world.run_round(1.01)
    await mover.run()


async def test_rows_past_their_retention_leave_the_table() -> None:
    """Those of a file that is old as a whole, and those that were merged with younger ones; the others stay."""
    world = await lived()
    mover = LedgerMover(world.registers, keep_ns=10 * DAY_NS)
    await expire_one(world, "old", mover)
    await expire_one(world, "older-than-most", mover)
    await world.run_round(8.0)
    await expire_one(world, "young", mover)

    await world.run_round(2.0)
    await mover.run()

    assert [] == await world.ledger("b", "old")
    assert ["", "DELETED"] == [row.outcome for row in await world.ledger("b", "young")]


async def test_a_file_of_old_and_young_rows_is_written_again_without_the_old() -> None:
    """Only when its oldest rows are late by more than the slack: a file is not written again for every row."""
    world = await lived()
    await expire_one(world, "old", LedgerMover(world.registers))
    world.lake.write("b", "young")
    await world.run_round(1.01)
    table = LedgerTable(world.registers.runtime)
    rows = [row async for _, row in table.rows("b")] + await world.ledger("b", "young")
    merged = LedgerMover(world.registers)
    await merged.run()
    between_ns = max(row.at_ns for row in rows if row.key == "old") + 1

    assert 0 == await table.expire(between_ns, slack_ns=DAY_NS)
    assert 2 == await table.expire(between_ns)

    assert {"young"} == {row.key for row in await world.ledger("b")}


@pytest.mark.parametrize("at", ["read", "write"])
async def test_rows_that_retention_removes_while_a_move_takes_their_file_along_do_not_come_back(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker's retention, between the move's look at the table and its commit."""
    monkeypatch.setattr(ledger, "FILES_MAX", 1)
    world = await lived()
    mover, table = LedgerMover(world.registers), LedgerTable(world.registers.runtime)
    await expire_one(world, "old", mover)
    world.lake.write("b", "young")
    await world.run_round(1.01)
    between_ns = 1 + max(row.at_ns for row in await world.ledger("b", "old"))
    inner, gone = getattr(mover._table._table, at), []

    async def slow(*words: Any, **said: Any) -> Any:
        gone.append(await table.expire(between_ns))
        return await inner(*words, **said)

    monkeypatch.setattr(mover._table._table, at, slow)
    await mover.run()

    assert 2 == sum(gone)
    assert ["young", "young"] == [row.key for row in await world.ledger("b")]


@pytest.mark.parametrize("by", ["move", "retention"])
async def test_rows_that_another_worker_moves_while_retention_writes_them_again_are_there_once(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its move takes the file along, or its own retention writes the rows first: what was planned before is dropped."""
    monkeypatch.setattr(ledger, "FILES_MAX", 1)
    world = await lived(fold_s=0.0)
    mover, table = LedgerMover(world.registers), LedgerTable(world.registers.runtime)
    for key in ("old", "young"):
        await expire_one(world, key, mover)
    between_ns = 1 + max(row.at_ns for row in await world.ledger("b", "old"))
    world.lake.write("b", "new")
    await world.run_round(1.01)
    other, write = LedgerTable(world.registers.runtime), table._table.write

    async def overtaken(rows: Any) -> Any:
        made = await write(rows)
        await (mover.run() if by == "move" else other.expire(between_ns))
        return made

    monkeypatch.setattr(table._table, "write", overtaken)
    gone = await table.expire(between_ns)
    monkeypatch.undo()
    later = await table.expire(between_ns)
    keys = [row.key for row in await world.ledger("b")]

    assert (0, 2 if by == "move" else 0) == (gone, later)
    assert ["new", "new", "young", "young"] == sorted(keys)


async def test_a_ledger_without_retention_keeps_every_row() -> None:
    """0 is forever."""
    world = await lived()
    mover = LedgerMover(world.registers, keep_ns=0)
    await expire_one(world, "old", mover)
    await world.run_round(5000.0)
    await mover.run()

    assert 2 == len(await world.ledger("b", "old"))


async def test_every_deletion_is_published_and_no_intent_is() -> None:
    """In CloudEvents form; a move that is repeated publishes the same ids again, and nothing is moved unpublished."""
    world = await lived()
    sent: list[dict[str, Any]] = []
    down = True

    async def publish(events: Sequence[bytes]) -> None:
        sent.extend(msgspec.json.decode(event) for event in events)
        if down:
            raise Unavailable("the topic cannot be written")

    mover = LedgerMover(world.registers, publish=publish)
    world.lake.write("b", "k")
    await world.run_round(1.01)
    with pytest.raises(Unavailable):
        await mover.run()
    down = False
    await mover.run()

    assert 2 == len(sent) and sent[0] == sent[1]
    assert ("1.0", "io.lakebed.lifecycle.expiration.deleted", "/lakebed/lifecycle/b", "k") == tuple(
        sent[0][name] for name in ("specversion", "type", "source", "subject")
    )
    assert ("s3:LifecycleExpiration:Delete", "r") == (sent[0]["data"]["event_name"], sent[0]["data"]["rule_id"])
    assert ["", "DELETED"] == [row.outcome for row in await world.ledger("b", "k")]


@pytest.mark.parametrize(
    ("verb", "version", "kind", "name"),
    [
        ("CURRENT", "", "deleted", "s3:LifecycleExpiration:Delete"),
        ("CURRENT", "v1", "delete_marker_created", "s3:LifecycleExpiration:DeleteMarkerCreated"),
        ("VERSION", "v1", "deleted", "s3:LifecycleExpiration:Delete"),
        ("DELETE_MARKER", "v1", "deleted", "s3:LifecycleExpiration:Delete"),
        ("ABORT_MPU", "", "upload_aborted", ""),
    ],
)
def test_an_event_says_what_was_done(verb: str, version: str, kind: str, name: str) -> None:
    """As S3's own event names do; each has its own id."""
    row = LedgerRow(
        at_ns=1_700_000_000_123_456_789,
        run="w",
        bucket="b",
        key="k",
        rule_hash="0" * 16,
        kind=ActionKind.EXPIRATION_DAYS,
        verb=verb,
        identity=ObjectIdentity(1, 2),
        stream="s",
        version_id=version,
        outcome="DELETED",
    )

    first, second = map(msgspec.json.decode, expiration_events("b/1.jsonl", [row, row]))

    assert (f"io.lakebed.lifecycle.expiration.{kind}", name) == (first["type"], first["data"]["event_name"])
    assert "2023-11-14T22:13:20.123457Z" == first["time"]
    assert ("b/1.jsonl#0", "b/1.jsonl#1") == (first["id"], second["id"])
