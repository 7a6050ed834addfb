"""`lakebed queue`: what each option selects, what a dry run leaves alone, and what the trail keeps."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from lakebed.cli import exits
from lakebed.cli.where import Where
from lakebed.core.errors import Invalid, NotFound, Unprocessable
from lakebed.queue import commands as queue
from lakebed.queue.model import Append
from lakebed.queue.roles import Queue
from support.shell import Shell


def put(shell: Shell, *values: str, name: str = "orders") -> list[str]:
    """One batch for each value; their locations."""
    return [shell.data("queue", "put", "-q", name, "--key", "k", "--value", value)["location"] for value in values]


def bury(shell: Shell, name: str = "orders") -> str:
    """Enqueues a batch that nobody can read and drains the queue, so that the batch becomes a dead letter."""
    location = f"ingest/{name}/00000000/bad.batch"

    async def spoil() -> None:
        context = shell.context_of(Where().settings(), role="test")
        await shell.store.create(location, b"not a batch")
        await Queue.of(context, name).producer.append([Append("test", 1, 0, location, 11, 1)])

    asyncio.run(spoil())
    shell("queue", "drain", "-q", name)
    return str(shell.data("queue", "dlq", "list", "-q", name)[0]["id"])


def values(out: str) -> list[str]:
    return [json.loads(line)["value"] for line in out.splitlines()]


def test_each_line_of_stdin_is_an_entry_without_its_line_end(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over several ingest calls; the answer counts all of them."""
    monkeypatch.setattr(queue, "LINES_AT_ONCE", 2)

    answer = shell.data("queue", "put", "-q", "orders", "--key", "k", stdin=b"a\nb\r\nc\n\ne")
    _, out, words = shell("queue", "drain", "-q", "orders")

    assert 5 == answer["entries"]
    assert ["a", "b", "c", "", "e"] == values(out)
    assert {"k"} == {json.loads(line)["key"] for line in out.splitlines()}
    assert "batches were taken" in words


def test_a_put_of_nothing_is_refused(shell: Shell) -> None:
    """An empty stdin is an error with a hint, an empty --value is an entry."""
    code, _, err = shell("queue", "put")
    empty = shell.data("queue", "put", "--value", "")

    assert exits.code_for(Unprocessable("")) == code
    assert "give --value, or lines on stdin" in err
    assert 1 == empty["entries"]


def test_a_drain_takes_at_most_so_many_batches_and_a_dry_one_none(shell: Shell) -> None:
    """Both report the same number; the trail has the real one, with its count."""
    put(shell, "one", "two", "three")

    _, none, would = shell("queue", "drain", "-q", "orders", "--count", "2", "--dry-run")
    _, first, did = shell("queue", "drain", "-q", "orders", "--count", "2")
    _, rest, last = shell("queue", "drain", "-q", "orders")

    assert ("", "2 batches would be taken") == (none, would.strip())
    assert (["one", "two"], "2 batches were taken") == (values(first), did.strip())
    assert (["three"], "1 batches were taken") == (values(rest), last.strip())
    assert [
        ("queue.drain", {"queue": "orders"}, "", "done", "1 batches"),
        ("queue.drain", {"queue": "orders"}, "", "done", "2 batches"),
    ] == shell.deeds()


def test_a_peek_shows_the_first_entries_of_the_next_batches_and_takes_none(shell: Shell) -> None:
    """As many batches and entries as requested."""
    shell("queue", "put", "-q", "orders", stdin=b"a\nb\nc\nd\ne\n")
    put(shell, "second", "third")

    (default, *_) = shell.data("queue", "peek", "-q", "orders")
    few = shell.data("queue", "peek", "-q", "orders", "--count", "2", "--entries", "1")

    assert (5, ["a", "b", "c"]) == (default["entries"], [entry["value"] for entry in default["first"]])
    assert [["a"], ["second"]] == [[entry["value"] for entry in row["first"]] for row in few]
    assert 3 == len(shell.data("queue", "peek", "-q", "orders"))


def test_the_status_is_of_every_queue_or_of_the_one_that_is_named(shell: Shell) -> None:
    """Each row counts its own batches."""
    put(shell, "a", "b")
    put(shell, "c", name="mail")

    every = shell.data("queue", "status")
    one = shell.data("queue", "status", "-q", "mail")

    assert [("mail", 1), ("orders", 2)] == sorted((row["queue"], row["pending"]) for row in every)
    assert [("mail", 1)] == [(row["queue"], row["pending"]) for row in one]


def test_waiting_batches_are_shown_up_to_a_count(shell: Shell) -> None:
    """Oldest first, with the number of entries in each."""
    locations = put(shell, "a", "b", "c")

    shown = shell.data("queue", "waiting", "-q", "orders", "--count", "2")

    assert [(1, locations[0], 1), (2, locations[1], 1)] == [
        (row["sequence"], row["location"], row["entries"]) for row in shown
    ]


def test_sweep_deletes_done_batches_and_a_dry_one_does_not(shell: Shell) -> None:
    """The words count both kinds; data of done batches leaves the bucket. `clean` is the former name."""
    put(shell, "a", "b")
    shell("queue", "drain", "-q", "orders")

    _, _, would = shell("queue", "sweep", "-q", "orders", "--dry-run")
    before = [key for key in shell.keys("ingest/orders/") if key.endswith(".batch")]
    _, _, did = shell("queue", "clean", "-q", "orders")
    after = [key for key in shell.keys("ingest/orders/") if key.endswith(".batch")]

    assert "2 done batches and 0 orphans would be deleted" == would.strip()
    assert "2 done batches and 0 orphans were deleted" == did.strip()
    assert (2, 0) == (len(before), len(after))
    assert ("queue.clean", {"queue": "orders"}, "", "done", "") == shell.deeds()[0]


def test_a_stored_object_is_decoded_from_the_bucket_or_from_a_file(shell: Shell, tmp_path: Path) -> None:
    """A batch shows its entries, a manifest what is pending."""
    (location,) = put(shell, "a")
    batch = shell.data("queue", "dump", location)
    manifest = shell.data("queue", "dump", "ingest/orders/manifest.json")
    file = tmp_path / "copy.batch"
    file.write_bytes(asyncio.run(shell.store.get(location)).data)
    local = shell.data("queue", "dump", str(file), "--file")
    missing, _, _ = shell("queue", "dump", "ingest/orders/none.batch")

    assert (1, [location]) == (batch["count"], manifest["object"]["pending"])
    assert batch["entries"] == local["entries"]
    assert exits.code_for(NotFound("")) == missing


def test_a_letter_is_replayed_or_discarded_for_a_reason(shell: Shell) -> None:
    """Blank reasons are refused; a dry run decides nothing; a real one is on the trail with its letter."""
    letter = bury(shell)
    shown = shell.data("queue", "dlq", "show", letter, "-q", "orders")

    blank, _, why = shell("queue", "dlq", "replay", letter, "-q", "orders", "--reason", " ")
    _, _, would = shell("queue", "dlq", "discard", letter, "-q", "orders", "--reason", "no", "--dry-run")
    still = [row["id"] for row in shell.data("queue", "dlq", "list", "-q", "orders")]
    _, _, replayed = shell("queue", "dlq", "replay", letter, "-q", "orders", "--reason", "again")
    after = shell.data("queue", "dlq", "list", "-q", "orders")

    assert None is shown["entries"] and shown["undecodable"].startswith("corrupt: ")
    assert exits.code_for(Invalid("")) == blank
    assert "--reason is empty" in why
    assert would.startswith(f"would discard {letter}: ") and [letter] == still
    assert f"{letter} was enqueued again as sequence 2" == replayed.strip()
    assert [] == after
    assert ("queue.replay", {"queue": "orders", "letter": letter}, "again", "done", "") == shell.deeds()[0]


def test_letters_of_a_queue_that_does_not_exist_are_not_an_empty_list(shell: Shell) -> None:
    """Not found, as in every other command; a queue without letters has an empty list."""
    put(shell, "fine")

    none = shell.data("queue", "dlq", "list", "-q", "orders")
    code, out, said = shell("queue", "dlq", "list", "-q", "nosuch")

    assert [] == none
    assert (exits.code_for(NotFound("")), "") == (code, out) and "no queue nosuch" in said


def test_a_discarded_letter_is_gone_from_its_queue_alone(shell: Shell) -> None:
    """A letter of another queue is not found under this one."""
    letter = bury(shell, "mail")

    elsewhere, _, _ = shell("queue", "dlq", "discard", letter, "-q", "orders", "--reason", "spoilt")
    code, _, reported = shell("queue", "dlq", "discard", letter, "-q", "mail", "--reason", "spoilt")

    assert (exits.code_for(NotFound("")), exits.OK) == (elsewhere, code)
    assert f"{letter} was discarded" == reported.strip()
    assert [] == shell.data("queue", "dlq", "list", "-q", "mail")


def test_the_entries_of_a_readable_letter_are_shown(shell: Shell) -> None:
    """A batch that its consumer rejected is still whole."""
    put(shell, "fine")

    async def reject() -> None:
        collector = Queue.of(shell.contexts[-1], "orders").collector("test")
        try:
            while (batch := await collector.next_batch()) is not None:
                await collector.reject(batch, "bad luck")
        finally:
            await collector.close()

    for _ in range(20):
        asyncio.run(reject())
        shell.clock.ahead_s += 3600.0
        if letters := shell.data("queue", "dlq", "list", "-q", "orders"):
            break
    shown = shell.data("queue", "dlq", "show", letters[0]["id"], "-q", "orders")

    assert [{"key": "k", "value": "fine"}] == shown["entries"]
    assert "bad luck" in shown["reason"]
