"""A change that knows whether it was done: pure, wrapped around every decision on a head.

A write may be done, overwritten by somebody else, and then answered with a conflict. So every decision gets a number of
its writer's, stored with it. When the head that stands has come to that number, the attempt is in it and is not made
again; when the head no longer remembers the writer, nobody can tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from lakebed.errors import OutcomeUnknown
from lakebed.meta.bucket_model import WRITERS_MAX, Head

R = TypeVar("R")


class Writer:
    """A process as the heads name it, with the number of its last decision."""

    def __init__(self, id: str) -> None:
        self.id, self.last = id, 0


class Change:
    """One change through all its attempts."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._number = 0
        self._answer: Any = None

    def deciding(
        self, decide: Callable[[Head], tuple[Head, R]]
    ) -> Callable[[Head], tuple[Head, tuple[Head | None, R]]]:
        """`decide` for the register. Its result comes with the head that it leaves behind, if that is a new one."""

        def once(head: Head) -> tuple[Head, tuple[Head | None, R]]:
            if self._number and self._done(head):
                return head, self._answer
            self._number = 0  # the last attempt is not in this head, so it never will be
            after, result = decide(head)
            if after is head:
                return head, (None, result)
            self._writer.last += 1
            self._number, self._answer = self._writer.last, (after, result)
            return msgspec.structs.replace(after, writers=self._signed(head.writers)), self._answer

        return once

    def _done(self, head: Head) -> bool:
        last = head.writers.get(self._writer.id)
        if last is None and len(head.writers) >= WRITERS_MAX:
            raise OutcomeUnknown("a conflict was answered, and the group no longer remembers this writer")
        return last is not None and last >= self._number

    def _signed(self, writers: dict[str, int]) -> dict[str, int]:
        """The writers with this one as the latest."""
        others = [(id, last) for id, last in writers.items() if id != self._writer.id]
        return dict([*others[-(WRITERS_MAX - 1) :], (self._writer.id, self._number)])
