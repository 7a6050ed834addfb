"""`lakebed topics create`, `groups` and `delete-group`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, as_operator
from lakebed.core.errors import AlreadyExists, Invalid, NotFound
from lakebed.log.commands import DryRun, Name, TrailReason, with_broker
from lakebed.log.model import TopicConfig, topic_partition

if TYPE_CHECKING:
    from lakebed.log.broker import Broker

PARTITIONS_MAX = 1000  # made by one command


def create(
    topic: Name,
    /,
    *,
    partitions: Annotated[int, Parameter(name=["--partitions", "-n"], help="number of partitions")] = 1,
    retention_s: Annotated[float, Parameter(help="keep records this long; 0 for ever")] = 0.0,
    retention_bytes: Annotated[int, Parameter(help="keep this many bytes of each partition; 0 for all")] = 0,
    dry_run: DryRun = False,
    where: Where = Where(),
) -> None:
    """Create a topic with empty partitions. A topic that exists is left as it is: exits 6.

    Not needed before the first `produce`, which creates the partition that it appends to.
    """
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise Invalid(f"{partitions} partitions", hint=f"from 1 to {PARTITIONS_MAX}")
    if retention_s < 0 or retention_bytes < 0:
        raise Invalid("retention cannot be negative", hint="0 keeps everything")

    async def work(broker: Broker) -> None:
        if found := await broker.admin.partitions(topic):
            raise AlreadyExists(
                f"topic {topic} exists with {len(found)} partitions", hint=f"lakebed topics describe {topic}"
            )
        tps = [topic_partition(topic, number) for number in range(partitions)]
        if not dry_run:
            subject = {"topic": topic, "partitions": str(partitions)}
            async with as_operator(where.context("cli"), "log.create", subject):
                for tp in tps:
                    await broker.writer.ensure(tp)
                if retention_s or retention_bytes:
                    await broker.admin.configure(topic, TopicConfig(retention_s, retention_bytes))
        say(f"{'would create' if dry_run else 'created'} {topic} with {partitions} partitions")

    with_broker(where, work)


def groups(
    topic: Annotated[str, Parameter(help="only this topic")] = "",
    /,
    *,
    group: Annotated[str, Parameter(help="only this group")] = "",
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """List consumer groups: committed offset and lag in each partition."""

    async def work(broker: Broker) -> list[Any]:
        found = sorted(
            {tp.topic for tp in await (broker.admin.existing(topic) if topic else broker.admin.partitions())}
        )
        return [row for each in found for row in await broker.groups.progress(each, group)]

    emit(with_broker(where, work), output)


def delete_group(
    topic: Name,
    /,
    *,
    group: Annotated[str, Parameter(help="the group")],
    reason: TrailReason,
    dry_run: DryRun = False,
    where: Where = Where(),
) -> None:
    """Delete a group's offsets in a topic. Its next member begins at the start of the log."""

    async def work(broker: Broker) -> None:
        found = await broker.groups.progress(topic, group)
        if not found:
            raise NotFound(f"group {group} has no offsets in {topic}", hint=f"lakebed topics groups {topic}")
        if not dry_run:
            async with as_operator(where.context("cli"), "log.delete-group", {"topic": topic, "group": group}, reason):
                await broker.groups.forget(topic, group)
        say(f"{'would delete' if dry_run else 'deleted'} {group} in {len(found)} partitions of {topic} ({reason})")

    with_broker(where, work)
