"""Deletes by key list: `Drainer` the due exceptions of one action, `Applier` the candidates of a dry run."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from lakebed.lifecycle import blockers
from lakebed.lifecycle.engine import ActionRef, CompiledAction, PolicySnapshot
from lakebed.lifecycle.model import ActionKind, Mode, StreamKind, StreamResolution
from lakebed.lifecycle.resolver import Resolver, WorkItem
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.state import LifecycleState, PendingIndex, PendingItem, Stream, changed


class Drainer:
    def __init__(self, resolver: Resolver, state: LifecycleState, settings: LifecycleSettings) -> None:
        self._resolver, self._state, self._settings = resolver, state, settings
        self._size = state.metrics.gauge("lakebed_lifecycle_pending_size")
        self._shown: set[ActionRef] = set()

    async def waiting(self, snapshot: PolicySnapshot) -> list[CompiledAction]:
        """The actions that may have exceptions: those of the index, or all when it is of an older version."""
        self._show_only(snapshot)
        index = (await self._state.pending.read()).value
        every = [
            action
            for action in snapshot.actions.values()
            if action.mode is not Mode.DISABLED and action.kind is not ActionKind.EXPIRATION_DATE
        ]
        if index.version:
            return [action for action in every if str(action.ref) in index.refs]
        found = [action for action in every if (await self._resolver.pending.load(action.ref)).items]
        refs = tuple(str(action.ref) for action in found)
        await self._state.pending.change(changed(lambda known: PendingIndex(1, tuple({*known.refs, *refs}))))
        return found

    async def nothing_waits(self) -> bool:
        """Whether no action has exceptions, by the index alone."""
        index = (await self._state.pending.read()).value
        return bool(index.version) and not index.refs

    async def next_due(self, action: CompiledAction) -> int | None:
        """When the next item is due; None when nothing waits or the drain is blocked."""
        name = str(action.ref.key)
        log = await self._resolver.pending.load(action.ref)
        self._size.labels(bucket=action.ref.bucket, action=name).set(len(log.items))
        self._shown.add(action.ref)
        if not log.items:
            return None
        held = (await self._state.blockers.read()).value
        lane = Stream(StreamKind.PENDING, bucket=action.ref.bucket, action=name).lane
        return None if blockers.blocks(held, lane) else log.next_due_ns

    async def run(self, action: CompiledAction) -> None:
        """Drains what is due, up to the first item that cannot be resolved now."""
        due = (await self._resolver.pending.load(action.ref)).due(self._state.clock.now_ns())
        for first in range(0, len(due), self._settings.batch):
            items = due[first : first + self._settings.batch]
            answers = await self._resolver.settle([self._work(action, item) for item in items])
            done = [item.id for item, answer in zip(items, answers, strict=True) if answer.resolved]
            await self._resolver.pending.remove(action.ref, done)
            if len(done) < len(items):
                break

    def _show_only(self, snapshot: PolicySnapshot) -> None:
        """An action that is gone has no exceptions, and no sample."""
        for ref in self._shown - snapshot.actions.keys():
            self._size.remove(ref.bucket, str(ref.key))
            self._shown.discard(ref)

    def _work(self, action: CompiledAction, item: PendingItem) -> WorkItem:
        """The object is read again: an item whose object changed is resolved by its present state."""
        stream = Stream(
            StreamKind.PENDING,
            bucket=action.ref.bucket,
            action=str(action.ref.key),
            key=item.key,
            version_id=item.version_id,
            upload_id=item.upload_id,
        )
        return WorkItem(stream, action.ref.bucket, item.key, (action,), item.upload_id)


class ApplyReport(msgspec.Struct, frozen=True):
    """Keys by result: `passed` needed nothing, `held` could not be resolved now."""

    keys: int = 0
    deleted: int = 0
    passed: int = 0
    held: int = 0

    def plus(self, answers: list[StreamResolution]) -> ApplyReport:
        done = sum(answer is StreamResolution.DONE for answer in answers)
        held = sum(not answer.resolved for answer in answers)
        return ApplyReport(
            self.keys + len(answers),
            self.deleted + done,
            self.passed + len(answers) - done - held,
            self.held + held,
        )


class Applier:
    def __init__(self, resolver: Resolver, settings: LifecycleSettings) -> None:
        self._resolver, self._settings = resolver, settings

    async def run(self, bucket: str, keys: AsyncIterator[str], snapshot: PolicySnapshot) -> ApplyReport:
        """Resolves the keys by the policy in force, in batches. A key may come more than once in a row."""
        applied, last, works = ApplyReport(), None, list[WorkItem]()
        async for key in keys:
            if key == last:
                continue
            last = key
            actions = tuple(one for one in snapshot.match_path(bucket, key) if one.mode is not Mode.DISABLED)
            works.append(WorkItem(Stream(StreamKind.BOOTSTRAP, bucket=bucket, key=key), bucket, key, actions))
            if len(works) >= self._settings.batch:
                applied, works = applied.plus(await self._resolver.settle(works)), []
        return applied.plus(await self._resolver.settle(works)) if works else applied
