"""`lakebed queue`: show queues, put and drain entries, replay or discard dead letters. Works on the bucket."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from lakebed.cli.output import Output, emit, say, shown_bytes
from lakebed.cli.where import Where, as_operator, in_loop
from lakebed.core.errors import LakebedError, NotFound, OutcomeUnknown, Unprocessable
from lakebed.queue import paths, view
from lakebed.queue.ingestor import WriteWatcher
from lakebed.queue.model import Durable, KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.queue.view import dump as dump_bytes
from lakebed.queue.view import shown

app = App(name="queue", help="Queues: status, contents, dead letters.")
dlq = App(name="dlq", help="Dead letters: batches that could not be processed.")
app.command(dlq)

Name = Annotated[str, Parameter(name=["--queue", "-q"], help="the queue")]
DryRun = Annotated[bool, Parameter(help="only show what would happen")]
Reason = Annotated[str, Parameter(help="why; kept in the audit trail")]
Letter = Annotated[str, Parameter(help="id of the dead letter: `lakebed queue dlq list`")]
LINES_AT_ONCE = 1000  # entries of one ingest call; the ingestor decides when to flush
LETTERS_MAX = 100_000  # most dead letters of one list
CALLS_MAX = 1000  # ingest calls of `put` that are not durable yet
BATCHES_MAX = 1000  # most batches of one `drain` or `peek`


def _open(where: Where, name: str) -> Queue:
    return Queue.of(where.context("cli"), name)


async def _existing(where: Where, name: str) -> Queue:
    """Raises NotFound for a queue that nothing was put into."""
    queue = _open(where, name)
    if not await queue.exists():
        raise NotFound(
            f"no queue {name}", hint="lakebed queue status lists them; a queue exists from its first entry on"
        )
    return queue


@app.command
def status(*, queue: Name = "", where: Where = Where(), output: Output = "table") -> None:
    """Show the status of each queue: waiting, claimed, done and dead batches, and the oldest of each."""

    async def work() -> Any:
        if queue:
            await _existing(where, queue)
        return await view.statuses(where.context("cli"), queue)

    emit(in_loop(work), output)


@app.command
def waiting(
    *,
    queue: Name = paths.DEFAULT,
    count: Annotated[int, Parameter(help="batches to show")] = 60,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show the batches that are not done: their age, the collector that claimed them, and their last rejection."""

    async def work() -> Any:
        await _existing(where, queue)
        return await view.waiting(where.context("cli"), queue, limit=min(count, BATCHES_MAX))

    emit(in_loop(work), output)


@app.command
def peek(
    *, queue: Name = paths.DEFAULT, count: int = 10, entries: int = 3, where: Where = Where(), output: Output = "table"
) -> None:
    """Show the next batches and their first entries, without claiming them.

    Parameters
    ----------
    count
        batches to show.
    entries
        entries of each batch to show.
    """

    async def work() -> Any:
        await _existing(where, queue)
        return await view.peek(where.context("cli"), queue, count=min(count, BATCHES_MAX), entries=entries)

    emit(in_loop(work), output)


@app.command
def dump(key: str, /, *, file: bool = False, where: Where = Where(), output: Output = "json") -> None:
    """Decode one stored object of a queue: a manifest, a batch or a dead letter.

    Parameters
    ----------
    key
        its key in the bucket, or a path with --file.
    file
        read a local file instead.
    """

    async def fetch() -> bytes:
        return (await where.context("cli").store.get(key)).data

    emit(dump_bytes(key, Path(key).read_bytes() if file else in_loop(fetch)), output)


@app.command
def put(
    *,
    queue: Name = paths.DEFAULT,
    key: str = "",
    value: str | None = None,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Enqueue entries and wait until they are durable: one from --value, or one per line of stdin.

    Parameters
    ----------
    key
        the key of every entry.
    value
        the value; without it, stdin is read.
    """
    lines = iter([value.encode()]) if value is not None else (line.rstrip(b"\r\n") for line in sys.stdin.buffer)

    async def work() -> dict[str, Any]:
        return await _put(_open(where, queue), (KeyValueEntry(key.encode(), line) for line in lines))

    emit(in_loop(work), output)


async def _put(opened: Queue, entries: Iterator[KeyValueEntry]) -> dict[str, Any]:
    """Enqueues the entries and counts what became durable; raises with both counts when something did not."""
    ingestor, counts = opened.ingestor(), Counter[str]()
    window: deque[tuple[WriteWatcher, int]] = deque()
    failure: LakebedError | None = None
    last: Durable | None = None

    async def settle(limit: int) -> None:
        nonlocal failure, last
        while len(window) > limit:
            watcher, size = window.popleft()
            try:
                last = await watcher.await_durable()
                counts["durable"] += size
            except LakebedError as error:
                failure = failure or error
                counts["unknown" if isinstance(error, OutcomeUnknown) else "lost"] += size

    while chunk := list(islice(entries, LINES_AT_ONCE)):
        try:
            window.append((await ingestor.ingest(chunk), len(chunk)))
        except LakebedError as error:  # refused whole; what was sent before it is still awaited and counted
            failure = failure or error
            counts["lost"] += len(chunk)
            break
        await settle(CALLS_MAX)
    await ingestor.close()
    await settle(0)
    if failure is not None:
        failure.message = (
            f"{counts['durable']} entries are durable, {counts['lost']} are not, {counts['unknown']} may or may not be;"
            f" the first error: {failure.message}"
        )
        failure.args = (failure.message,)
        raise failure
    if last is None:
        raise Unprocessable("no entries were given", hint="give --value, or lines on stdin")
    return {"entries": counts["durable"], "location": last.location, "sequence": last.sequence}


@app.command
def drain(
    *, queue: Name = paths.DEFAULT, count: int = BATCHES_MAX, dry_run: DryRun = False, where: Where = Where()
) -> None:
    """Take batches out of the queue: print each entry as a JSON line, then ack its batch.

    Parameters
    ----------
    count
        most batches to take.
    """

    async def work() -> int:
        opened = await _existing(where, queue)
        if dry_run:
            return min((await opened.status()).pending, count, BATCHES_MAX)
        async with as_operator(where.context("cli"), "queue.drain", {"queue": queue}) as action:
            taken = await _drained(opened, count)
            action.detail = f"{taken} batches"
            return taken

    taken = in_loop(work)
    say(f"{taken} batches {'would be' if dry_run else 'were'} taken")


async def _drained(opened: Queue, count: int) -> int:
    collector, taken = opened.collector("cli"), 0
    try:
        while taken < min(count, BATCHES_MAX) and (batch := await collector.next_batch()) is not None:
            for entry in batch.entries:
                print(shown_bytes(msgspec.json.encode({"sequence": batch.sequence, **shown(entry)})).decode())
            sys.stdout.flush()
            await collector.ack(batch)
            taken += 1
    finally:
        await collector.close()
    return taken


@app.command
def sweep(*, queue: Name = paths.DEFAULT, dry_run: DryRun = False, where: Where = Where()) -> None:
    """Delete done batches, and batches that were stored but never enqueued. Workers do this regularly."""

    async def work() -> tuple[int, int]:
        opened = _open(where, queue)
        if dry_run:
            return await _swept(opened, dry_run=True)
        async with as_operator(where.context("cli"), "queue.clean", {"queue": queue}):
            return await _swept(opened, dry_run=False)

    done, orphans = in_loop(work)
    say(f"{done} done batches and {orphans} orphans {'would be' if dry_run else 'were'} deleted")


async def _swept(opened: Queue, *, dry_run: bool) -> tuple[int, int]:
    done = orphans = 0
    for shard in await opened.shards():
        done += len((await shard.consumer.read()).done) if dry_run else await shard.sweeper.sweep_done()
        orphans += len(await shard.sweeper.sweep_orphans(dry_run=dry_run))
    return done, orphans


app.command(sweep, name="clean", show=False)  # the former name


@dlq.command(name="list")
def dlq_list(*, queue: Name = paths.DEFAULT, where: Where = Where(), output: Output = "table") -> None:
    """List the dead letters, oldest first."""

    async def work() -> list[Any]:
        found = await view.letters(where.context("cli"), queue, limit=LETTERS_MAX)
        if not found:
            await _existing(where, queue)
        return found

    emit(in_loop(work), output, columns=("id", "sequence", "rejections", "reason", "location"))


@dlq.command(name="show")
def dlq_show(
    letter: Letter, /, *, queue: Name = paths.DEFAULT, where: Where = Where(), output: Output = "json"
) -> None:
    """Show one dead letter with its entries, or why they do not decode."""

    async def work() -> dict[str, Any]:
        letters = await _open(where, queue).letters_of(letter)
        found = await letters.show(letter)
        row: dict[str, Any] = msgspec.to_builtins(found)
        try:
            return row | {"entries": [shown(entry) for entry in await letters.entries(found)]}
        except LakebedError as error:
            return row | {"entries": None, "undecodable": f"{error.code}: {error.message}"}

    emit(in_loop(work), output)


@dlq.command(name="replay")
def dlq_replay(
    letter: Letter, /, *, reason: Reason, queue: Name = paths.DEFAULT, dry_run: DryRun = False, where: Where = Where()
) -> None:
    """Append a dead letter's data to its queue again and close the letter."""
    _decide(where, queue, letter, reason, dry_run, "replay")


@dlq.command(name="discard")
def dlq_discard(
    letter: Letter, /, *, reason: Reason, queue: Name = paths.DEFAULT, dry_run: DryRun = False, where: Where = Where()
) -> None:
    """Delete a dead letter and its data. Its description and the reason are kept."""
    _decide(where, queue, letter, reason, dry_run, "discard")


def _decide(where: Where, queue: str, letter: str, reason: str, dry_run: bool, action: str) -> None:
    async def work() -> str:
        context = where.context("cli")
        letters = await Queue.of(context, queue).letters_of(letter)
        found = await letters.show(letter)
        if dry_run:
            return f"would {action} {found.id}: {found.reason}"
        async with as_operator(context, f"queue.{action}", {"queue": queue, "letter": letter}, reason):
            if action == "replay":
                return f"{found.id} was enqueued again as sequence {(await letters.replay(letter, reason)).sequence}"
            await letters.discard(letter, reason)
            return f"{found.id} was discarded"

    say(in_loop(work))
