"""The queue page: what waits, who has claimed it, and dead letters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lakebed.console.page import (
    FAST_S,
    SLOW_S,
    Action,
    DataSource,
    Fields,
    PageRequest,
    PageSamples,
    PartPage,
    deferred,
    first,
)
from lakebed.queue import view
from lakebed.queue.roles import Queue


async def _replay_letter(page: QueuePage, fields: Fields, who: str, reason: str) -> str:
    durable = await Queue.of(page.context, fields["queue"]).dead_letters.replay(fields["letter"], reason)
    return f"enqueued again as sequence {durable.sequence}"


async def _discard_letter(page: QueuePage, fields: Fields, who: str, reason: str) -> str:
    letter = await Queue.of(page.context, fields["queue"]).dead_letters.discard(fields["letter"], reason)
    return f"discarded sequence {letter.sequence}"


class QueuePage(PartPage):
    name = "queue"
    path = "/queue"
    title = "Queue"
    about = "Waiting and claimed batches, and dead letters."
    actions = {
        "queue.replay": Action(
            "Replay a dead letter",
            "Replay",
            ("queue", "letter"),
            lambda f: f"queue:admin:{f['queue']}",
            lambda f: "Enqueues the data again at the end of the queue and closes the letter.",
            _replay_letter,
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
        name, batch = query.text("queue") or first(samples["queues"], "queue"), query.text("batch")
        if name:
            samples |= await request.load(waiting=self.waiting(name), letters=self.letters(name))
            if batch:
                samples |= await request.load(batch=self.batch(name, batch))
        return samples, {"queue": name, "batch": batch}

    def overview(self) -> dict[str, DataSource]:
        return {"queues": self.queues()}

    @staticmethod
    def levels(latest: Callable[[str], Any]) -> dict[str, float | None]:
        queues = latest("queue.statuses")
        if queues is None:
            return dict.fromkeys(("queue_waiting", "queue_claimed", "queue_dead", "queue_oldest_s"))
        return {
            "queue_waiting": sum(row.pending for row in queues),
            "queue_claimed": sum(row.claimed for row in queues),
            "queue_dead": sum(row.dead for row in queues),
            "queue_oldest_s": max((row.pending_age_s or 0.0 for row in queues), default=0.0),
        }

    def queues(self) -> DataSource:
        return DataSource("queue:read", "queue.statuses", FAST_S, lambda: view.statuses(self.context))

    def waiting(self, name: str) -> DataSource:
        make = deferred(lambda: view.waiting(self.context, name))
        return DataSource(f"queue:read:{name}", f"queue.waiting:{name}", FAST_S, make)

    def letters(self, name: str) -> DataSource:
        make = deferred(lambda: view.letters(self.context, name))
        return DataSource(f"queue:read:{name}", f"queue.letters:{name}", FAST_S, make)

    def batch(self, name: str, location: str) -> DataSource:
        make = deferred(lambda: view.batch(self.context, name, location))
        return DataSource(f"queue:read:{name}", f"queue.batch:{name}:{location}", SLOW_S, make)
