"""The audit in DynamoDB where a server of the tests does not behave like AWS: a scan is answered page by page, boto3
repeats a put whose answer was lost, and a table is not there at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from botocore.exceptions import ClientError

from lakebed.core.clock import ManualClock, now_ms
from lakebed.ticks import aws
from lakebed.ticks.audit import AuditRow
from lakebed.ticks.audit.dynamodb import DynamoAudit
from lakebed.ticks.model import TickId
from lakebed.ticks.settings import TicksSettings


class PagedDynamo:
    """A table with the calls of boto3. A scan gives two items a page; some pages are empty, and so is the last."""

    def __init__(self) -> None:
        self.items: dict[str, dict[str, Any]] = {}
        self.scans: list[dict[str, Any]] = []
        self.repeats: dict[str, Any] | None = None  # what the next put finds instead: its own first attempt, or another

    def put_item(self, Item: dict[str, Any], **_: Any) -> Any:
        key = Item["tick_key"]["S"]
        if self.repeats is not None:
            self.items[key], self.repeats = self.repeats or Item, None
            raise ClientError({"Error": {"Code": "ConditionalCheckFailedException"}}, "PutItem")
        self.items[key] = Item

    def get_item(self, Key: dict[str, Any], ConsistentRead: bool, **_: Any) -> Any:
        assert ConsistentRead  # otherwise it may be older than the last put
        found = self.items.get(Key["tick_key"]["S"])
        return {} if found is None else {"Item": found}

    def scan(self, ExclusiveStartKey: dict[str, Any] | None = None, **asked: Any) -> Any:
        self.scans.append(asked)
        items = list(self.items.values())
        pages = [items[:2], [], *(items[at : at + 2] for at in range(2, len(items), 2)), []]
        number = int(ExclusiveStartKey["page"]["N"]) if ExclusiveStartKey is not None else 0
        more = {"LastEvaluatedKey": {"page": {"N": str(number + 1)}}} if number + 1 < len(pages) else {}
        return {"Items": pages[number], **more}


@pytest.fixture
def dynamo() -> PagedDynamo:
    return PagedDynamo()


@pytest.fixture
def audit(dynamo: PagedDynamo, manual_clock: ManualClock) -> DynamoAudit:
    made = DynamoAudit(TicksSettings(), "silver_dispatched", clock=manual_clock)
    made._opened = dynamo
    return made


def row(clock: ManualClock, tick: str, attempt: str = "a", *, lives_s: int = 60) -> AuditRow:
    now = now_ms(clock)
    return AuditRow("o", "p", tick, "running", attempt, now, now // 1000 + lives_s, {"tries": 1})


async def test_every_row_is_found_however_many_pages_a_scan_has(
    audit: DynamoAudit, dynamo: PagedDynamo, manual_clock: ManualClock
) -> None:
    """A page ends at 1 MB, and may be empty with others behind it: the last is the one that names no next."""
    rows = [row(manual_clock, f"t{number}", lives_s=-1 if number == 3 else 60) for number in range(9)]
    for each in rows:
        assert await audit.create(each)

    listed = [each async for each in audit.rows()]
    pages, dynamo.scans = len(dynamo.scans), []
    ticks = [each async for each in audit.ticks()]

    assert [each for each in rows if each.tick_id != "t3"] == listed  # its time is over
    assert [each.tick for each in rows] == ticks
    assert pages == len(dynamo.scans) == 7
    assert all(asked["ConsistentRead"] and asked["ProjectionExpression"] == "tick_key" for asked in dynamo.scans)


@pytest.mark.parametrize(("theirs", "expected"), [(False, True), (True, False)])
async def test_a_put_that_was_refused_is_done_when_the_row_is_our_own(
    audit: DynamoAudit, dynamo: PagedDynamo, manual_clock: ManualClock, theirs: bool, expected: bool
) -> None:
    """The first answer was lost and the repeat found the row that it had written: nobody else has the tick."""
    mine, other = row(manual_clock, "t1", "mine"), row(manual_clock, "t1", "theirs")
    await audit.create(other)
    taken = dynamo.items.pop(other.tick.path)

    dynamo.repeats = taken if theirs else {}
    created = await audit.create(mine)
    held = await audit.get(TickId("o", "p", "t1"))
    dynamo.repeats = taken if theirs else {}
    changed = await audit.change(mine, other)

    assert (expected, expected, other if theirs else mine) == (created, changed, held)


class MakingDynamo(PagedDynamo):
    """Tables that take two looks to become active; another process may create one first."""

    def __init__(self, *, rival: bool, expires: str) -> None:
        super().__init__()
        self.status: str | None = None
        self.rival, self.looks, self.expires = rival, 0, expires
        self.asked: list[str] = []

    def describe_table(self, TableName: str) -> Any:
        if self.status is None:
            self.status = "CREATING" if self.rival else None
            raise ClientError({"Error": {"Code": "ResourceNotFoundException"}}, "DescribeTable")
        self.looks += 1
        return {"Table": {"TableStatus": "ACTIVE" if self.looks > 2 else self.status}}

    def create_table(self, TableName: str, **_: Any) -> Any:
        self.asked.append(f"create {TableName}")
        if self.status is not None:
            raise ClientError({"Error": {"Code": "ResourceInUseException"}}, "CreateTable")
        self.status = "CREATING"

    def describe_time_to_live(self, TableName: str) -> Any:
        assert self.looks > 2, "a table that is not active is not asked"
        return {"TimeToLiveDescription": {"TimeToLiveStatus": self.expires}}

    def update_time_to_live(self, TableName: str, TimeToLiveSpecification: dict[str, Any]) -> Any:
        self.asked.append(f"expire by {TimeToLiveSpecification['AttributeName']}")


@pytest.mark.parametrize("rival", [False, True])
@pytest.mark.parametrize(("expires", "asked"), [("DISABLED", ["expire by expires_at_s"]), ("ENABLED", [])])
async def test_a_table_is_made_once_and_used_when_it_is_active(
    monkeypatch: pytest.MonkeyPatch, manual_clock: ManualClock, rival: bool, expires: str, asked: list[str]
) -> None:
    """Also when another process makes it at the same time; its rows expire, by whoever made it."""
    dynamo, opened = MakingDynamo(rival=rival, expires=expires), list[str]()
    monkeypatch.setattr(aws, "client", lambda kind, settings: opened.append(kind) or dynamo)
    audit = DynamoAudit(TicksSettings(), "bronze_committed", clock=manual_clock)

    puts = [asyncio.create_task(audit.create(row(manual_clock, tick))) for tick in ("t1", "t2")]
    async with asyncio.timeout(30):
        while not all(put.done() for put in puts):
            await manual_clock.advance(0.5)

    assert [True, True] == [put.result() for put in puts]
    assert (["dynamodb"], ["create lakebed-bronze_committed", *asked]) == (opened, dynamo.asked)
    assert {"o/p/t1", "o/p/t2"} == set(dynamo.items)
