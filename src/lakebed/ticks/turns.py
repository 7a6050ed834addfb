"""Whose turn it is inside one replica: one finalize of an org at a time, orgs beside each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lakebed.errors import Overloaded


class _Line:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting = 0


class Turns:
    """A lock for each org that is being worked for; none is kept for an org that is not."""

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._lines: dict[str, _Line] = {}

    def __len__(self) -> int:
        return len(self._lines)

    @asynccontextmanager
    async def of(self, org_id: str) -> AsyncIterator[None]:
        """Waits for the org's turn, in the order of asking. Raises Overloaded when too many wait."""
        line = self._lines.setdefault(org_id, _Line())
        if line.waiting > self._waiting_max:
            raise Overloaded(f"{self._waiting_max} finalizes of this org already wait", retry_after_s=2.0)
        line.waiting += 1
        try:
            async with line.lock:
                yield
        finally:
            line.waiting -= 1
            if not line.waiting:
                self._lines.pop(org_id, None)
