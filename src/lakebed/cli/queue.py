"""`lakebed queue`: look into queues, put and drain by hand, and decide about dead letters. Works on the bucket."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, by_hand, in_loop
from lakebed.errors import Invalid, LakebedError, Unprocessable
from lakebed.queue import paths
from lakebed.queue.dumping import dump as dump_bytes
from lakebed.queue.dumping import shown
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.queue import Queue
from lakebed.views import queue as views

app = App(name="queue", help="Queues: status, contents, dead letters.")
dlq = App(name="dlq", help="Dead letters: batches that could not be processed.")
app.command(dlq)

Name = Annotated[str, Parameter(name=["--queue", "-q"], help="the queue")]
DryRun = Annotated[bool, Parameter(help="say what would happen, and do nothing")]
Reason = Annotated[str, Parameter(help="why; kept with what was done")]
Letter = Annotated[str, Parameter(help="the letter, as `lakebed queue dlq list` shows it")]
LINES_AT_ONCE = 1000  # entries of one ingest call; the ingestor flushes and waits as it sees fit
BATCHES_MAX = 1000  # batches that one `drain` or `peek` goes through at most


def _open(where: Where, name: str) -> Queue:
    return Queue.of(where.context("cli"), name)


@app.command
def status(*, queue: Name = "", where: Where = Where(), output: Output = "table") -> None:
    """Show how each queue stands: waiting, claimed, done, dead, and the oldest of each."""
    emit(in_loop(lambda: views.statuses(where.context("cli"), queue)), output)


@app.command
def waiting(
    *,
    queue: Name = paths.DEFAULT,
    count: Annotated[int, Parameter(help="batches to show")] = 60,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show the batches that are not done: their age, who holds them and what was wrong with them."""
    emit(in_loop(lambda: views.waiting(where.context("cli"), queue, limit=min(count, BATCHES_MAX))), output)


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
    emit(in_loop(lambda: views.peek(where.context("cli"), queue, count=most, entries=entries)), output)


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
    """Enqueue entries and wait until they are durable: one from --value, or one for each line of stdin.

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
            raise Unprocessable("there are no entries", hint="give --value, or lines on stdin")
        last = await watcher.await_durable()
        return {"entries": count, "location": last.location, "sequence": last.sequence}

    emit(in_loop(work), output)


@app.command
def drain(
    *, queue: Name = paths.DEFAULT, count: int = BATCHES_MAX, dry_run: DryRun = False, where: Where = Where()
) -> None:
    """Take batches out of the queue: each entry is printed as a JSON line, and acked once it is written.

    Parameters
    ----------
    count
        batches to take at most.
    """

    async def work() -> int:
        opened = _open(where, queue)
        if dry_run:
            return len([location async for location, _, _ in opened.waiting()])
        async with by_hand(where.context("cli"), "queue.drain", {"queue": queue}) as told:
            taken = await _taken(opened, count)
            told.detail = f"{taken} batches"
            return taken

    taken = in_loop(work)
    say(f"{taken} batches {'would be' if dry_run else 'were'} taken")


async def _taken(opened: Queue, count: int) -> int:
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
def clean(*, queue: Name = paths.DEFAULT, dry_run: DryRun = False, where: Where = Where()) -> None:
    """Remove done batches and sweep what was stored long ago but never enqueued. Workers do this by themselves."""

    async def work() -> tuple[int, int]:
        opened = _open(where, queue)
        if dry_run:
            return len((await opened.consumer.read()).done), len(await opened.sweeper.sweep(dry_run=True))
        async with by_hand(where.context("cli"), "queue.clean", {"queue": queue}):
            return await opened.cleaner.clean(), len(await opened.sweeper.sweep())

    done, orphans = in_loop(work)
    say(f"{done} done batches and {orphans} orphans {'would be' if dry_run else 'were'} removed")


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
    """Show one dead letter with its entries, or why they cannot be shown."""

    async def work() -> dict[str, Any]:
        opened = _open(where, queue)
        found = await opened.dead_letters.show(letter)
        told: dict[str, Any] = msgspec.to_builtins(found)
        try:
            return told | {"entries": [shown(entry) for entry in await opened.dead_letters.entries(found)]}
        except LakebedError as error:
            return told | {"entries": None, "undecodable": f"{error.code}: {error.message}"}

    emit(in_loop(work), output)


@dlq.command(name="replay")
def dlq_replay(
    letter: Letter, /, *, reason: Reason, queue: Name = paths.DEFAULT, dry_run: DryRun = False, where: Where = Where()
) -> None:
    """Enqueue a dead letter's data again, at the end of the queue, and close the letter."""
    _decide(where, queue, letter, reason, dry_run, "replay")


@dlq.command(name="discard")
def dlq_discard(
    letter: Letter, /, *, reason: Reason, queue: Name = paths.DEFAULT, dry_run: DryRun = False, where: Where = Where()
) -> None:
    """Remove a dead letter and its data for good. What it was, and why it went, is kept."""
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
        async with by_hand(context, f"queue.{action}", {"queue": queue, "letter": letter}, reason):
            if action == "replay":
                return f"{found.id} is enqueued again as sequence {(await letters.replay(letter, reason)).sequence}"
            await letters.discard(letter, reason)
            return f"{found.id} is discarded"

    say(in_loop(work))
