"""The protocol of a message queue: at-least-once, hidden while processed, a dead letter after too many receives.

The bucket's own queue and SQS pass one contract suite. A message that is received is hidden for the visibility
timeout; when it is not deleted by then it becomes visible again, with its receive count one higher. One that was
received `receives_max` times is not delivered again: it becomes a dead letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from lakebed.core.errors import Corrupt
from lakebed.ticks.model import TickMessage

BATCH_MAX = 10  # SQS's own limit of one receive


class ReceivedMessage(msgspec.Struct, frozen=True):
    """A received message. `receipt` is valid until the message is visible again; empty for one that was only read."""

    message_id: str
    receipt: str
    body: str
    receive_count: int
    sent_at_ms: int = 0

    def message(self) -> TickMessage:
        """Raises Corrupt when the body is not a message of version 1.0."""
        try:
            found = msgspec.json.decode(self.body, type=TickMessage)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Corrupt(f"message {self.message_id} does not decode: {error}") from error
        if found.schema_version != "1.0":
            raise Corrupt(f"message {self.message_id} has version {found.schema_version[:20]!r}")
        return found

    def is_of(self, tick_id: str) -> bool:
        """Whether it is of this tick; False for a body that does not decode."""
        try:
            return self.message().tick_id == tick_id
        except Corrupt:
            return False


class QueueDepth(msgspec.Struct, frozen=True):
    """How many messages wait, are in flight (hidden), and are dead letters."""

    waiting: int
    in_flight: int
    dead: int


class TickQueue(Protocol):
    async def send(self, message: TickMessage) -> str:
        """Enqueues a message, durable when it returns; returns its id. A repeat makes a second message."""

    async def receive(self, count: int = BATCH_MAX) -> Sequence[ReceivedMessage]:
        """Up to `count` visible messages, now hidden from others; possibly none."""

    async def delete(self, receipt: str) -> None:
        """Deletes a processed message. An expired receipt does nothing."""

    async def hide(self, receipt: str, seconds: int) -> None:
        """Hides the message for this long from now; 0 makes it visible at once. An expired receipt does nothing."""

    async def depth(self) -> QueueDepth: ...

    async def dead_letters(self, count: int = 100) -> Sequence[ReceivedMessage]:
        """Reads dead letters without removing them."""

    async def replay(self, count: int = 100, *, tick_id: str = "") -> int:
        """Moves dead letters back into the queue, with new receive counts; only those of `tick_id` if given."""


def encode(message: TickMessage) -> str:
    return msgspec.json.encode(message).decode()
