"""One partition's turns in one process: appends commit in the order in which they were asked for.

A ticket is taken before the blob is written, so blobs of one process travel side by side while each partition stays
ordered. What is known of the control record after a turn is kept: an uncontended append is one compare-and-swap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from lakebed.errors import LakebedError
from lakebed.log.model import Control, TopicPartition
from lakebed.log.records import Versioned

# Index entries of several partitions on their way; the result names those that did not arrive.
Materialising = asyncio.Task[dict[TopicPartition, LakebedError]]


class Lane:
    def __init__(self, tp: TopicPartition) -> None:
        self.tp = tp
        self.known: Versioned[Control] | None = None
        self.materialising: tuple[str, Materialising] | None = None  # whose index entry is on its way
        self.appends = 0
        self.waiting = 0
        self._tail: asyncio.Future[None] | None = None

    def forget(self) -> None:
        """What is known may be wrong: the next turn reads."""
        self.known, self.materialising = None, None

    def ticket(self) -> Ticket:
        self.waiting += 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        made = Ticket(self, self._tail, done)
        self._tail = done
        return made


class Ticket:
    """A place in the lane: `turn` waits for everybody before, `leave` lets the next one go. Leave in any case."""

    def __init__(self, lane: Lane, before: asyncio.Future[None] | None, done: asyncio.Future[None]) -> None:
        self.lane, self._before, self._done = lane, before, done

    @property
    def ready(self) -> bool:
        """Whether everybody before has left."""
        return self._before is None or self._before.done()

    async def turn(self) -> None:
        if self._before is not None and not self._before.done():
            await asyncio.wait([self._before])

    def leave(self) -> None:
        """Who leaves before their turn leaves a gap that closes when their turn comes."""
        if self._done.done():
            return
        if self._before is not None and not self._before.done():
            self._before.add_done_callback(lambda _: self.leave())
            return
        self.lane.waiting -= 1
        self._done.set_result(None)


async def any_turn(tickets: Iterable[Ticket]) -> None:
    """Returns when one of them is ready."""
    before = [ticket._before for ticket in tickets if ticket._before is not None]
    await asyncio.wait(before, return_when=asyncio.FIRST_COMPLETED)
