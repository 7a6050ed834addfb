"""Audit rows in DynamoDB: one table each, keyed by `tick_key` (org/project/tick), with DynamoDB's own expiry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from lakebed.core.clock import Clock, now_ms
from lakebed.core.errors import Corrupt, Unavailable
from lakebed.ticks import aws
from lakebed.ticks.audit import AuditRow
from lakebed.ticks.model import TickId
from lakebed.ticks.settings import TicksSettings

OWN = ("tick_key", "org_id", "project_id", "tick_id", "state", "attempt_id", "at_ms", "expires_at_s", "schema")
MADE_TRIES, MADE_PAUSE_S = 60, 0.5


class DynamoAudit:
    """The table `<prefix><table>` is created on first use."""

    def __init__(self, settings: TicksSettings, table: str, *, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._name = settings.dynamodb_prefix + table
        self._opened: Any = None
        self._opening = asyncio.Lock()

    async def create(self, row: AuditRow) -> bool:
        return await self._put(
            row,
            "attribute_not_exists(tick_key) OR expires_at_s <= :now",
            {":now": {"N": str(now_ms(self._clock) // 1000)}},
        )

    async def change(self, row: AuditRow, was: AuditRow) -> bool:
        return await self._put(row, "attempt_id = :was", {":was": {"S": was.attempt_id}})

    async def get(self, tick: TickId) -> AuditRow | None:
        found = await aws.call(
            f"get from {self._name}",
            (await self._open()).get_item,
            TableName=self._name,
            Key={"tick_key": {"S": tick.path}},
            ConsistentRead=True,
        )
        item = found.get("Item")
        return None if item is None or self._over(item) else _row(item)

    async def clear(self, tick: TickId) -> None:
        await aws.call(
            f"delete from {self._name}",
            (await self._open()).delete_item,
            TableName=self._name,
            Key={"tick_key": {"S": tick.path}},
        )

    async def rows(self) -> AsyncIterator[AuditRow]:
        async for item in self._scan():
            if not self._over(item):
                yield _row(item)

    async def ticks(self) -> AsyncIterator[TickId]:
        async for item in self._scan(ProjectionExpression="tick_key"):
            yield TickId(*item["tick_key"]["S"].split("/"))

    async def _scan(self, **more: Any) -> AsyncIterator[dict[str, Any]]:
        dynamo, start = await self._open(), dict[str, Any]()
        while True:
            page = await aws.call(
                f"scan {self._name}", dynamo.scan, TableName=self._name, ConsistentRead=True, **more, **start
            )
            for item in page.get("Items", ()):
                yield item
            if not page.get("LastEvaluatedKey"):
                return
            start = {"ExclusiveStartKey": page["LastEvaluatedKey"]}

    async def sweep(self) -> int:
        return 0  # DynamoDB removes rows by their expires_at_s

    async def _put(self, row: AuditRow, condition: str, values: dict[str, Any]) -> bool:
        try:
            await aws.call(
                f"put into {self._name}",
                (await self._open()).put_item,
                TableName=self._name,
                Item=_item(row),
                ConditionExpression=condition,
                ExpressionAttributeValues=values,
            )
        except aws.AwsError as error:
            if error.detail["aws_code"] != "ConditionalCheckFailedException":
                raise
            # Boto3 may have retried a put whose response was lost: then the row is our own.
            found = await self.get(row.tick)
            return found is not None and found.attempt_id == row.attempt_id
        return True

    def _over(self, item: Any) -> bool:
        return int(item["expires_at_s"]["N"]) * 1000 <= now_ms(self._clock)

    async def _open(self) -> Any:
        async with self._opening:
            if self._opened is None:
                dynamo = await asyncio.to_thread(aws.client, "dynamodb", self._settings)
                await self._make(dynamo)
                self._opened = dynamo
            return self._opened

    async def _make(self, dynamo: Any) -> None:
        for _ in range(MADE_TRIES):
            try:
                found = await aws.call(f"find table {self._name}", dynamo.describe_table, TableName=self._name)
                if found["Table"]["TableStatus"] == "ACTIVE":
                    await self._expire(dynamo)
                    return
            except aws.AwsError as error:
                if error.detail["aws_code"] != "ResourceNotFoundException":
                    raise
                await self._create_table(dynamo)
            await self._clock.sleep(MADE_PAUSE_S)
        raise Unavailable(f"table {self._name} did not become active within 30 s")

    async def _create_table(self, dynamo: Any) -> None:
        try:
            await aws.call(
                f"create table {self._name}",
                dynamo.create_table,
                TableName=self._name,
                KeySchema=[{"AttributeName": "tick_key", "KeyType": "HASH"}],
                AttributeDefinitions=[{"AttributeName": "tick_key", "AttributeType": "S"}],
                BillingMode="PAY_PER_REQUEST",
            )
        except aws.AwsError as error:
            if error.detail["aws_code"] != "ResourceInUseException":
                raise

    async def _expire(self, dynamo: Any) -> None:
        found = await aws.call(f"describe {self._name}", dynamo.describe_time_to_live, TableName=self._name)
        if found.get("TimeToLiveDescription", {}).get("TimeToLiveStatus") in ("ENABLED", "ENABLING"):
            return
        await aws.call(
            f"enable expiry of {self._name}",
            dynamo.update_time_to_live,
            TableName=self._name,
            TimeToLiveSpecification={"Enabled": True, "AttributeName": "expires_at_s"},
        )


def _item(row: AuditRow) -> dict[str, Any]:
    own = {name: getattr(row, name) for name in OWN if name != "tick_key"}
    values = {**row.fields, **own, "tick_key": row.tick.path}
    return {name: {"N": str(value)} if isinstance(value, int) else {"S": value} for name, value in values.items()}


def _row(item: dict[str, Any]) -> AuditRow:
    try:
        plain = {name: int(value["N"]) if "N" in value else value["S"] for name, value in item.items()}
        fields = {name: value for name, value in plain.items() if name not in OWN}
        own = {name: plain[name] for name in OWN if name != "tick_key"}
        return msgspec.convert({**own, "fields": fields}, AuditRow)
    except (KeyError, ValueError, msgspec.ValidationError) as error:
        raise Corrupt(f"an audit row does not decode: {error}") from error
