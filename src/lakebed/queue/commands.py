"""`lakebed queue`: show queues, put and drain entries, replay or discard dead letters. Works on the bucket."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, as_operator, in_loop
from lakebed.core.errors import Invalid, LakebedError, Unprocessable
from lakebed.queue import paths, view
from lakebed.queue.model import KeyValueEntry
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
BATCHES_MAX = 1000  # most batches of one `drain` or `peek`


def _open(where: Where, name: str) -> Queue:
    return Queue.of(where.context("cli"), name)


@app.command
def status(*, queue: Name = "", where: Where = Where(), output: Output = "table") -> None:
    """Show the status of each queue: waiting, claimed, done and dead batches, and the oldest of each."""
    emit(in_loop(lambda: view.statuses(where.context("cli"), queue)), output)


@app.command
def waiting(
    *,
    queue: Name = paths.DEFAULT,
    count: Annotated[int, Parameter(help="batches to show")] = 60,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show the batches that are not done: their age, the collector that claimed them, and their last rejection."""
    emit(in_loop(lambda: view.waiting(where.context("cli"), queue, limit=min(count, BATCHES_MAX))), output)


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
    most = min(count, BATCHES_MAX)
    emit(in_loop(lambda: view.peek(where.context("cli"), queue, count=most, entries=entries)), output)


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
        ingestor = _open(where, queue).ingestor()
        count, watcher = 0, None
        while chunk := [KeyValueEntry(key.encode(), line) for line in islice(lines, LINES_AT_ONCE)]:
            watcher = await ingestor.ingest(chunk)
            count += len(chunk)
        await ingestor.close()
        if watcher is None:
            raise Unprocessable("no entries were given", hint="give --value, or lines on stdin")
        last = await watcher.await_durable()
        return {"entries": count, "location": last.location, "sequence": last.sequence}

    emit(in_loop(work), output)


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
        opened = _open(where, queue)
        if dry_run:
            waiting = len([location async for location, _, _ in opened.waiting()])
            return min(waiting, count, BATCHES_MAX)
        async with as_operator(where.context("cli"), "queue.drain", {"queue": queue}) as told:
            taken = await _drained(opened, count)
            told.detail = f"{taken} batches"
            return taken

    taken = in_loop(work)
    say(f"{taken} batches {'would be' if dry_run else 'were'} taken")


async def _drained(opened: Queue, count: int) -> int:
    collector, taken = opened.collector("cli"), 0
    try:
        while taken < min(count, BATCHES_MAX) and (batch := await collector.next_batch()) is not None:
            for entry in batch.entries:
                print(msgspec.json.encode({"sequence": batch.sequence, **shown(entry)}).decode())
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
            return len((await opened.consumer.read()).done), len(await opened.sweeper.sweep_orphans(dry_run=True))
        async with as_operator(where.context("cli"), "queue.clean", {"queue": queue}):
            return await opened.sweeper.sweep_done(), len(await opened.sweeper.sweep_orphans())

    done, orphans = in_loop(work)
    say(f"{done} done batches and {orphans} orphans {'would be' if dry_run else 'were'} deleted")


app.command(sweep, name="clean", show=False)  # the former name


@dlq.command(name="list")
def dlq_list(*, queue: Name = paths.DEFAULT, where: Where = Where(), output: Output = "table") -> None:
    """List the dead letters, oldest first."""

    async def work() -> list[Any]:
        return [letter async for letter in _open(where, queue).dead_letters.letters()]

    emit(in_loop(work), output, columns=("id", "sequence", "rejections", "reason", "location"))


@dlq.command(name="show")
def dlq_show(
    letter: Letter, /, *, queue: Name = paths.DEFAULT, where: Where = Where(), output: Output = "json"
) -> None:
    """Show one dead letter with its entries, or why they do not decode."""

    async def work() -> dict[str, Any]:
        opened = _open(where, queue)
        found = await opened.dead_letters.show(letter)
        row: dict[str, Any] = msgspec.to_builtins(found)
        try:
            return row | {"entries": [shown(entry) for entry in await opened.dead_letters.entries(found)]}
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
    if not reason.strip():
        raise Invalid(f"{action} needs a reason", hint=f"lakebed queue dlq {action} {letter} --reason 'why'")

    async def work() -> str:
        context = where.context("cli")
        letters = Queue.of(context, queue).dead_letters
        found = await letters.show(letter)
        if dry_run:
            return f"would {action} {found.id}: {found.reason}"
        async with as_operator(context, f"queue.{action}", {"queue": queue, "letter": letter}, reason):
            if action == "replay":
                return f"{found.id} was enqueued again as sequence {(await letters.replay(letter, reason)).sequence}"
            await letters.discard(letter, reason)
            return f"{found.id} was discarded"

    say(in_loop(work))
