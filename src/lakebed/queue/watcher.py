"""What `ingest` hands back: a way to see, or to wait, until the entries are durable."""

from __future__ import annotations

import asyncio

from lakebed.queue.model import Durable


class WriteWatcher:
    """Watches the batch that its entries went into. Any number of callers may wait; a cancelled one harms no other."""

    def __init__(self, outcome: asyncio.Future[Durable]) -> None:
        self._outcome = outcome

    def result(self) -> Durable | BaseException | None:
        """None while it is open; where the entries rest once they are durable; the error when they are not."""
        if not self._outcome.done():
            return None
        return self._outcome.exception() or self._outcome.result()

    async def await_durable(self) -> Durable:
        """Waits until the batch is stored and its location is in the producer manifest. Raises what prevented it.

        After OutcomeUnknown the entries may or may not be in the queue; after any other error they are not.
        """
        return await asyncio.shield(self._outcome)
