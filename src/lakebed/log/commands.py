"""`lakebed topics`: the log from the command line, similar to kcat and rpk."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from cyclopts import App, Parameter

from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, as_operator, in_loop
from lakebed.core.errors import Invalid, LakebedError

if TYPE_CHECKING:
    from lakebed.log.broker import Broker
    from lakebed.log.model import TopicPartition

R = TypeVar("R")

app = App(name="topics", help="Topics of the log: create, produce, consume, groups, trim, delete.")

Name = Annotated[str, Parameter(help="the topic")]
Partition = Annotated[int, Parameter(name=["--partition", "-p"], help="the partition")]
Before = Annotated[
    str, Parameter(help="offset, -N from the end, end, @MILLIS or ISO time: records before it are dropped")
]
Source = Annotated[str, Parameter(help="a file, or a key of the bucket")]
Reason = Annotated[str, Parameter(help="why; stored with the partition and shown by describe")]
TrailReason = Annotated[str, Parameter(help="why; stored in the audit trail")]
DryRun = Annotated[bool, Parameter(help="only show what would happen", negative="")]


@app.command(name="list")
def list_topics(*, where: Where = Where(), output: Output = "table") -> None:
    """List all topics with their partitions and record counts."""
    from lakebed.log.view import topics

    emit(with_broker(where, lambda broker: topics(broker.admin)), output)


@app.command
def describe(topic: Name, /, *, where: Where = Where(), output: Output = "table") -> None:
    """Show a topic's partitions: state, offsets, records that are not compacted yet."""
    from lakebed.log.view import partitions

    emit(with_broker(where, lambda broker: partitions(broker.admin, topic)), output)


@app.command
def segments(
    topic: Name,
    /,
    *,
    partition: Partition = 0,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show where a partition's records are stored: its first and last shared WAL blobs and compacted blobs."""

    async def work() -> Any:
        from lakebed.log.view import LogView

        window = LogView(where.context("cli"))
        try:
            return await window.segments(topic, partition)
        finally:
            await window.close()

    found = in_loop(work)
    emit(found.segments if output == "table" else found, output)


@app.command
def produce(
    topic: Name,
    /,
    *,
    partition: Partition = 0,
    key: Annotated[str, Parameter(name=["--key", "-k"], help="the key of every record")] = "",
    header: Annotated[
        list[str] | None,
        Parameter(name=["--header", "-H"], negative="", help="NAME=VALUE, of every record; repeatable"),
    ] = None,
    timestamp: Annotated[str, Parameter(help="the time of every record: @MILLIS or ISO time; empty for now")] = "",
    where: Where = Where(),
    output: Output = "jsonl",
) -> None:
    """Append each line of stdin as a record; prints their offsets."""

    async def work(broker: Broker) -> dict[str, Any]:
        from lakebed.core.clock import now_ms
        from lakebed.log.lines import lines_of_stdin, records_of, timestamp_ms
        from lakebed.log.model import topic_partition
        from lakebed.log.producers import RecordChunk

        tp = topic_partition(topic, partition)
        first = last = count = 0
        own_ms = timestamp_ms(timestamp) if timestamp else 0
        at_ms = own_ms or now_ms(where.context("cli").clock)
        try:
            for lines in lines_of_stdin(broker.settings.record_max_bytes):
                made = records_of(lines, key, header or [], at_ms, plain=not own_ms)
                (outcome,) = await broker.produce([(tp, RecordChunk(made))])
                if isinstance(outcome, LakebedError):
                    raise outcome
                first, last, count = first or outcome.start_offset, outcome.end_offset, count + outcome.count
        except LakebedError:
            if count:
                say(f"{count} records were appended, up to offset {last}")
            raise
        return {"topic": topic, "partition": partition, "count": count, "start_offset": first, "end_offset": last}

    emit(with_broker(where, work), output)


@app.command
def consume(
    topic: Name,
    /,
    *,
    partition: Partition = 0,
    offset: Annotated[
        str, Parameter(name=["--offset", "-o"], help="offset, -N from the end, start, end, @MILLIS or ISO time")
    ] = "start",
    count: Annotated[int, Parameter(name=["--count", "-c"], help="records to read; 0 for all")] = 0,
    format: Annotated[
        str,
        Parameter(
            name=["--format", "-f"],
            help="%s record, %k key, %h headers, %T timestamp, %o offset, %t topic, %p partition, %S size; or json",
        ),
    ] = "%s\\n",
    follow: Annotated[bool, Parameter(help="wait for more at the end", negative="")] = False,
    group: Annotated[str, Parameter(help="claim this group, continue at its committed offset, and commit")] = "",
    where: Where = Where(),
) -> None:
    """Print records to stdout, from an offset to the end."""

    async def work(broker: Broker) -> None:
        from lakebed.log.codec import RecordColumns, decoded
        from lakebed.log.fetcher import FetchRequest
        from lakebed.log.lines import print_record
        from lakebed.log.model import topic_partition
        from lakebed.log.reader import Fetched

        tp = topic_partition(topic, partition)
        claimed = await broker.groups.claim(group, tp) if group else None
        at = claimed.offset if claimed and claimed.offset else await _offset(broker, tp, offset)
        left = count or sys.maxsize
        while left > 0:
            (found,) = await broker.consume(
                [FetchRequest(tp, at, 1 << 20)], bytes_max=1 << 20, bytes_min=1, wait_s=30.0 if follow else 0.0
            )
            if not isinstance(found, Fetched):
                raise found
            if not found.count and not follow:
                break
            for part, record in ((each, record) for each in found.parts for record in decoded(each)):
                if left > 0:
                    print_record(format, tp, at, record, plain=isinstance(part, RecordColumns))
                    at, left = at + 1, left - 1
            sys.stdout.flush()  # before the commit; and whoever reads a follower's output has each record at once
            if claimed and found.count:
                await broker.groups.commit(group, tp, at, generation=claimed.generation)

    with_broker(where, work)


@app.command
def seek(
    topic: Name,
    /,
    *,
    group: Annotated[str, Parameter(help="the group")],
    to: Annotated[str, Parameter(help="offset, -N from the end, start, end, @MILLIS or ISO time")],
    reason: Annotated[str, Parameter(help="why; stored in the audit trail and with the group's offset")],
    partition: Partition = 0,
    dry_run: DryRun = False,
    where: Where = Where(),
) -> None:
    """Move a group's offset back or forward. Members that claimed the partition are fenced."""

    async def work(broker: Broker) -> None:
        from lakebed.log.model import topic_partition

        tp = topic_partition(topic, partition)
        at, now = await _offset(broker, tp, to), await broker.groups.committed(group, tp)
        say(f"{group} in {tp}: {now.offset if now else 0} → {at} ({reason})")
        if not dry_run:
            subject = {"topic": topic, "partition": str(partition), "group": group, "to": str(at)}
            async with as_operator(where.context("cli"), "log.seek", subject, reason):
                await broker.groups.commit(group, tp, at, note=reason, seek=True)

    with_broker(where, work)


@app.command
def report(*, where: Where = Where(), output: Output = "table") -> None:
    """Show consumer groups and their lag in every topic, stored bytes, and the estimated storage cost."""

    async def work(broker: Broker) -> dict[str, Any]:
        from lakebed.log import view

        return await view.report(broker.admin, broker.groups, await broker.store.measure())

    emit(with_broker(where, work), output)


@app.command
def trim(
    topic: Name,
    /,
    *,
    before: Before,
    reason: Reason,
    partition: Partition = 0,
    dry_run: DryRun = False,
    where: Where = Where(),
) -> None:
    """Drop the records before an offset (or time). Readers stop seeing them at once; retention frees the space."""

    async def work(broker: Broker) -> None:
        from lakebed.log.control import trimmed
        from lakebed.log.model import topic_partition

        tp = topic_partition(topic, partition)
        at = await _offset(broker, tp, before)
        now = await broker.reader.control(tp)
        trimmed(now, tp, at)  # refused before anything is said
        say(f"{tp}: {max(0, at - now.log_start_offset)} records before offset {at} ({reason})")
        if not dry_run:
            subject = {"topic": topic, "partition": str(partition), "before": str(at)}
            async with as_operator(where.context("cli"), "log.trim", subject, reason):
                await broker.admin.trim(tp, at)

    with_broker(where, work)


@app.command
def fence(
    topic: Name, /, *, reason: Reason, partition: Partition = 0, dry_run: DryRun = False, where: Where = Where()
) -> None:
    """Refuse every append from now on, on every broker."""
    change = _Change("log.fence", "fenced", lambda broker, tp: broker.admin.fence(tp, reason=reason))
    _change(where, topic, partition, dry_run, change, reason)


@app.command
def unfence(topic: Name, /, *, partition: Partition = 0, dry_run: DryRun = False, where: Where = Where()) -> None:
    """Accept appends again, after a fence."""
    change = _Change("log.unfence", "open", lambda broker, tp: broker.admin.unfence(tp))
    _change(where, topic, partition, dry_run, change)


@app.command
def delete(topic: Name, /, *, reason: Reason, dry_run: DryRun = False, where: Where = Where()) -> None:
    """Delete a topic. Retention and the sweep free its space later."""

    async def work(broker: Broker) -> None:
        found = await broker.admin.existing(topic)
        say(f"{topic}: {len(found)} partitions ({reason})")
        if not dry_run:
            async with as_operator(where.context("cli"), "log.delete", {"topic": topic}, reason):
                await broker.admin.delete(topic, reason=reason)

    with_broker(where, work)


@app.command
def sweep(*, reason: TrailReason, dry_run: DryRun = False, where: Where = Where(), output: Output = "table") -> None:
    """Delete blobs that nothing refers to and that are older than log.vacuum_horizon_s."""

    async def work() -> Any:
        from lakebed.log.services import LogServices

        context = where.context("cli")
        services = LogServices(context)
        try:
            if dry_run:
                return await services.sweeper.sweep_once(dry_run=True)
            async with as_operator(context, "log.vacuum", {}, reason):
                return await services.sweeper.sweep_once()
        finally:
            await services.close()

    say(f"sweep ({reason})")
    emit(in_loop(work), output)


app.command(sweep, name="vacuum", show=False)  # its former name
app.command("lakebed.log.group_commands:create", name="create")
app.command("lakebed.log.group_commands:groups", name="groups")
app.command("lakebed.log.group_commands:delete_group", name="delete-group")


@app.command
def dump(source: Source, /, *, where: Where = Where(), output: Output = "json") -> None:
    """Show the content of a stored blob: a file, or a key of the bucket."""

    from lakebed.log.blob import describe_blob

    async def fetched() -> bytes:
        return (await where.context("cli").store.get(source)).data

    file = Path(source)
    emit(describe_blob(file.read_bytes() if file.is_file() else in_loop(fetched)), output)


@asynccontextmanager
async def _broker(where: Where) -> AsyncIterator[Broker]:
    from lakebed.log.broker import Broker

    broker = Broker(where.context("cli"))
    try:
        yield broker
    finally:
        await broker.stop()


def with_broker(where: Where, work: Callable[[Broker], Coroutine[Any, Any, R]]) -> R:
    """Runs `work` on a broker in this process: no server is needed, only the bucket and the meta store."""

    async def run() -> R:
        async with _broker(where) as broker:
            return await work(broker)

    return in_loop(run)


class _Change(NamedTuple):
    """A change of a partition's state: its name in the audit trail, the new state, and the function that does it."""

    what: str
    word: str
    make: Callable[[Any, Any], Coroutine[Any, Any, Any]]


def _change(where: Where, topic: str, partition: int, dry_run: bool, change: _Change, reason: str = "") -> None:
    async def work(broker: Broker) -> None:
        from lakebed.log.model import topic_partition

        tp = topic_partition(topic, partition)
        now = await broker.reader.control(tp)
        say(f"{tp}: {now.log_state.lower()} → {change.word}")
        if not dry_run:
            subject = {"topic": topic, "partition": str(partition)}
            async with as_operator(where.context("cli"), change.what, subject, reason):
                await change.make(broker, tp)

    with_broker(where, work)


async def _offset(broker: Broker, tp: TopicPartition, text: str) -> int:
    """Parses an offset: 17, -10 (from the end), start, end, @1760000000000, 2026-01-31T12:00:00Z."""
    now = await broker.reader.control(tp)
    if text == "start":
        return now.log_start_offset
    if text == "end":
        return now.next_offset
    if text.removeprefix("-").isdecimal():
        return int(text) if int(text) >= 0 else max(now.log_start_offset, now.next_offset + int(text))
    from lakebed.log.lines import moment_ms

    if text in ("json", "jsonl"):  # as every other command names its output
        raise Invalid(f"{text!r} is not an offset", hint="records as JSON: topics consume -f json")
    return await broker.admin.offsets.at(tp, moment_ms(text, "an offset", "a number, -10, start, end, "))
