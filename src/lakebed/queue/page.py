"""The queue page: what waits, who has claimed it, and dead letters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lakebed.console.page import (
    FAST_S,
    SLOW_S,
    Action,
    Counted,
    DataSource,
    Fields,
    PageRequest,
    PageSamples,
    PartPage,
    SearchSource,
    deferred,
    limited_list,
)
from lakebed.queue import view
from lakebed.queue.model import QueueStatus
from lakebed.queue.roles import Queue
from lakebed.queue.view import WaitingRow

BULK_MAX = 100  # dead letters replayed by one action


async def _replay_letter(page: QueuePage, fields: Fields, who: str, reason: str) -> str:
    letters = await Queue.of(page.context, fields["queue"]).letters_of(fields["letter"])
    durable = await letters.replay(fields["letter"], reason)
    return f"enqueued again as sequence {durable.sequence}"


async def _replay_letters(page: QueuePage, fields: Fields, who: str, reason: str) -> str:
    queue, count = Queue.of(page.context, fields["queue"]), 0
    for letter in await view.letters(page.context, fields["queue"], limit=BULK_MAX):
        await (await queue.letters_of(letter.id)).replay(letter.id, reason)
        count += 1
    return f"{count} dead letters enqueued again"


async def _discard_letter(page: QueuePage, fields: Fields, who: str, reason: str) -> str:
    letters = await Queue.of(page.context, fields["queue"]).letters_of(fields["letter"])
    letter = await letters.discard(fields["letter"], reason)
    return f"discarded sequence {letter.sequence}"


def opened_first(rows: Sequence[QueueStatus]) -> str:
    """The queue that is shown when none is chosen: one with dead letters, else one with batches, else the first."""
    best = max(rows, key=lambda row: (row.dead > 0, row.pending + row.claimed > 0), default=None)
    return best.queue if best is not None else ""


def filtered(rows: Sequence[WaitingRow], state: str, owner: str) -> list[WaitingRow]:
    """Of the waiting batches: those that are claimed, free, or failed before, and those of one collector."""
    return [
        row
        for row in rows
        if owner in row.held_by
        and (state != "claimed" or row.held_by)
        and (state != "free" or not row.held_by)
        and (state != "failed" or row.rejections)
    ]


class QueuePage(PartPage):
    name = "queue"
    manual = "parts/queue.md"
    path = "/queue"
    title = "Queue"
    about = "Waiting and claimed batches, and dead letters."
    helpers = {"filtered": filtered}
    actions = {
        "queue.replay": Action(
            "Replay a dead letter",
            "Replay",
            ("queue", "letter"),
            lambda f: f"queue:admin:{f['queue']}",
            lambda f: "Enqueues the data again at the end of the queue and closes the letter.",
            _replay_letter,
        ),
        "queue.replay-all": Action(
            "Replay all dead letters",
            "Replay all",
            ("queue",),
            lambda f: f"queue:admin:{f['queue']}",
            lambda f: f"Enqueues the data of up to {BULK_MAX} letters again, oldest first, and closes them.",
            _replay_letters,
        ),
        "queue.discard": Action(
            "Discard a dead letter",
            "Discard permanently",
            ("queue", "letter"),
            lambda f: f"queue:admin:{f['queue']}",
            lambda f: "Deletes the letter and its data permanently. Its description and your reason are kept.",
            _discard_letter,
            danger=True,
        ),
    }

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        query = request.query
        samples = await request.load(queues=self.queues())
        name, batch = query.text("queue") or opened_first(samples["queues"].value or ()), query.text("batch")
        if name:
            samples |= await request.load(waiting=self.waiting(name), letters=self.letters(name))
            if batch:
                samples |= await request.load(batch=self.batch(name, batch))
        return samples, {"queue": name, "batch": batch, "state": query.text("state"), "owner": query.text("owner")}

    def searched(self) -> SearchSource:
        return SearchSource("queue", self.queues(), "queue")

    def overview(self) -> dict[str, DataSource]:
        return {"queues": self.queues()}

    @staticmethod
    def levels(latest: Callable[[str], Any]) -> dict[str, float | None]:
        queues = latest("queue.statuses")
        if queues is None:
            return dict.fromkeys(("queues", "queue_waiting", "queue_claimed", "queue_dead", "queue_oldest_s"))
        return {
            "queues": len(queues),
            "queue_waiting": sum(row.pending for row in queues),
            "queue_claimed": sum(row.claimed for row in queues),
            "queue_dead": sum(row.dead for row in queues),
            "queue_oldest_s": max((row.pending_age_s or 0.0 for row in queues), default=0.0),
        }

    async def count(self, from_ms: int, to_ms: int) -> Counted:
        total, done = await view.enqueued(self.context)
        return Counted({"queue_in": total, "queue_done": done})

    def queues(self) -> DataSource:
        return limited_list(
            "queue:read", "queue.statuses", FAST_S, lambda shows: view.statuses(self.context, shows=shows), "queue"
        )

    def waiting(self, name: str) -> DataSource:
        make = deferred(lambda: view.waiting(self.context, name))
        return DataSource(f"queue:read:{name}", f"queue.waiting:{name}", FAST_S, make)

    def letters(self, name: str) -> DataSource:
        make = deferred(lambda: view.letters(self.context, name))
        return DataSource(f"queue:read:{name}", f"queue.letters:{name}", FAST_S, make)

    def batch(self, name: str, location: str) -> DataSource:
        make = deferred(lambda: view.batch(self.context, name, location))
        return DataSource(f"queue:read:{name}", f"queue.batch:{name}:{location}", SLOW_S, make)
