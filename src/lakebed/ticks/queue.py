"""The seam to a message queue: at least once, hidden while it is worked on, a dead letter after too many tries.

The bucket's own queue and SQS pass one contract suite. A message that is received is hidden for the visibility
timeout; when it is not deleted by then it comes back, with its receive count one higher. One that was received
`receives_max` times is not handed out again: it becomes a dead letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from lakebed.errors import Corrupt
from lakebed.ticks.model import Message

BATCH_MAX = 10  # SQS's own limit of one receive


class Received(msgspec.Struct, frozen=True):
    """A message in hand. `receipt` is good until the message comes back; empty for one that is only looked at."""

    message_id: str
    receipt: str
    body: str
    receive_count: int
    sent_at_ms: int = 0

    def message(self) -> Message:
        """Raises Corrupt when the body is not a message of version 1.0."""
        try:
            found = msgspec.json.decode(self.body, type=Message)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Corrupt(f"message {self.message_id} does not decode: {error}") from error
        if found.schema_version != "1.0":
            raise Corrupt(f"message {self.message_id} has version {found.schema_version[:20]!r}")
        return found

    def is_of(self, tick_id: str) -> bool:
        """Whether it is of this tick; a body that cannot be read is of none."""
        try:
            return self.message().tick_id == tick_id
        except Corrupt:
            return False


class Depth(msgspec.Struct, frozen=True):
    """How many messages wait, are hidden in somebody's hand, and are dead letters."""

    waiting: int
    in_flight: int
    dead: int


class TickQueue(Protocol):
    async def send(self, message: Message) -> str:
        """Enqueues a message, durable when it returns; gives its id. A repeat makes a second message."""

    async def receive(self, count: int = BATCH_MAX) -> Sequence[Received]:
        """Up to `count` visible messages, hidden from others now. None is no error."""

    async def delete(self, receipt: str) -> None:
        """The message is done. A receipt that is over does nothing."""

    async def hide(self, receipt: str, seconds: int) -> None:
        """Hides the message for so long from now; 0 lets it come back at once. A receipt that is over does nothing."""

    async def depth(self) -> Depth: ...

    async def dead_letters(self, count: int = 100) -> Sequence[Received]:
        """Looks at dead letters without taking them."""

    async def redrive(self, count: int = 100, *, tick_id: str = "") -> int:
        """Sends dead letters back into the queue, with new receive counts; those of one tick if it is named."""


def encode(message: Message) -> str:
    return msgspec.json.encode(message).decode()
