"""Applies candidates that a listing gave: each is looked at anew and goes by the same guarded delete as any other.

A candidate is only a hint where to look. What is not due, kept by the policy in force, locked or gone is left alone;
what fails is told and stays for the next run, or for a safety scan.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from lakebed.lifecycle.engine import Snapshot
from lakebed.lifecycle.model import Mode, Resolution, StreamKind
from lakebed.lifecycle.resolver import Resolver, Work
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.state import Stream


class Applied(msgspec.Struct, frozen=True):
    """Keys by what became of them: `passed` needed nothing, `held` could not be resolved now."""

    keys: int = 0
    deleted: int = 0
    passed: int = 0
    held: int = 0

    def plus(self, answers: list[Resolution]) -> Applied:
        done = sum(answer is Resolution.DONE for answer in answers)
        held = sum(not answer.resolved for answer in answers)
        return Applied(
            self.keys + len(answers),
            self.deleted + done,
            self.passed + len(answers) - done - held,
            self.held + held,
        )


class Applier:
    def __init__(self, resolver: Resolver, settings: LifecycleSettings) -> None:
        self._resolver, self._settings = resolver, settings

    async def run(self, bucket: str, keys: AsyncIterator[str], snapshot: Snapshot) -> Applied:
        """Resolves the keys by the policy in force, in batches. A key may come more than once in a row."""
        applied, last, works = Applied(), None, list[Work]()
        async for key in keys:
            if key == last:
                continue
            last = key
            actions = tuple(one for one in snapshot.match_path(bucket, key) if one.mode is not Mode.DISABLED)
            works.append(Work(Stream(StreamKind.BOOTSTRAP, bucket=bucket, key=key), bucket, key, actions))
            if len(works) >= self._settings.batch:
                applied, works = applied.plus(await self._resolver.settle(works)), []
        return applied.plus(await self._resolver.settle(works)) if works else applied
