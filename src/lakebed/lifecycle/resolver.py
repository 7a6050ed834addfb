"""Resolves a batch of work items of any stream: look up, decide, write intents, delete guarded, write verdicts.

The resolution of an item tells whether its stream may pass it. An item that cannot be resolved has counted against its
retry budget, or has a stored blocker, before its resolution is returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from lakebed.core.clock import Clock
from lakebed.core.errors import Corrupt, LakebedError
from lakebed.core.logs import logger
from lakebed.lifecycle import blockers
from lakebed.lifecycle.decide import Decision, Deletion, decide, guard, outcome_of, resolution_of, same_entry
from lakebed.lifecycle.engine import ActionRef, CompiledAction
from lakebed.lifecycle.evaluate import evaluate
from lakebed.lifecycle.gauges import Gauges
from lakebed.lifecycle.ledger import DeletionLedger
from lakebed.lifecycle.model import Degraded, DeleteOutcome, Mode, ObjectEntry, Rule, StreamResolution, Verb
from lakebed.lifecycle.pending import PendingFull, PendingStore
from lakebed.lifecycle.policy import rules_of
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.seams import ChangeEvent, Deleter, Family, Lister, Policies, Removal
from lakebed.lifecycle.settings import LifecycleSettings, ns
from lakebed.lifecycle.state import BlockerState, BucketLifecycle, LedgerRow, LifecycleState, Stream, changed

log = logger("lifecycle")
_METADATA_ONLY = "metadata only: the bytes are removed with their volume"
_RESERVED = "the key belongs to Lakebed: no rule deletes it"


class DeleteRateLimiter:
    """Limits deletes per second; `per_s` of 0 is no limit."""

    def __init__(self, per_s: float, clock: Clock) -> None:
        self._per_s, self._clock = per_s, clock
        self._next_s = float("-inf")

    async def wait(self) -> None:
        """Returns when this caller may delete."""
        if self._per_s <= 0:
            return
        now_s = self._clock.monotonic_s()
        turn_s = max(self._next_s, now_s - 1.0)
        self._next_s = turn_s + 1.0 / self._per_s
        if turn_s > now_s:
            await self._clock.sleep(turn_s - now_s)


class WorkItem(msgspec.Struct, frozen=True):
    """A key (or upload) of a stream to resolve, and the actions that may apply to it."""

    stream: Stream
    bucket: str
    key: str
    actions: tuple[CompiledAction, ...]
    upload_id: str = ""
    event: ChangeEvent | None = None
    unreadable: str = ""
    family: Family | None = None  # as a listing showed it, where that is all a delete's condition needs


def is_unversioned(entry: ObjectEntry) -> bool:
    """Whether its identity says everything that matters about it: an object without versions."""
    return not entry.version_id and not entry.upload_id


class Seams(msgspec.Struct, frozen=True):
    """The store that rules are run on."""

    lister: Lister
    deleter: Deleter
    policies: Policies


class Resolver:
    def __init__(
        self, seams: Seams, state: LifecycleState, settings: LifecycleSettings, *, run: str, reserved: ReservedKeys
    ) -> None:
        """`reserved` are the keys that no rule may delete; `run` names this process in the ledger."""
        self._seams, self._state, self._settings, self._run, self.reserved = seams, state, settings, run, reserved
        self._clock: Clock = state.clock
        self._ledger = DeletionLedger(state.runtime)
        self.pending = PendingStore(state.runtime, items_max=settings.pending_max)
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._rate_limiter = DeleteRateLimiter(settings.deletes_per_s, state.clock)
        self._policies: dict[str, tuple[float, tuple[Rule, ...]]] = {}
        self._gauges = Gauges(state.metrics)
        self._under_way = 0

    async def settle(self, works: Sequence[WorkItem]) -> list[StreamResolution]:
        """One resolution per item, in order. Raises only what the store of lifecycle's state raises."""
        looked = await asyncio.gather(*(self._look(work) for work in works))
        decisions = [self._decide(work, found) for work, found in zip(works, looked, strict=True)]
        planned = [
            self._row(work, deletion)
            for work, decision in zip(works, decisions, strict=True)
            for deletion in decision.deletions
        ]
        if planned:
            await self._ledger.append(planned)
        rows: list[LedgerRow] = []
        answers = await asyncio.gather(
            *(
                self._resolve(work, found, decision, rows)
                for work, found, decision in zip(works, looked, decisions, strict=True)
            )
        )
        if rows:
            await self._ledger.append(rows)
        await self._forget([work.stream for work, answer in zip(works, answers, strict=True) if answer.resolved])
        return answers

    async def _look(self, work: WorkItem) -> Family | LakebedError:
        if work.unreadable:
            return Corrupt(f"the event cannot be read: {work.unreadable}")
        if work.family is not None:
            return work.family
        async with self._slots:
            try:
                return await self._seams.lister.look(work.bucket, work.key, work.upload_id)
            except LakebedError as error:
                return error

    def _decide(self, work: WorkItem, found: Family | LakebedError) -> Decision:
        if isinstance(found, LakebedError):
            return Decision()
        calendar, now_ns = self._settings.calendar, self._clock.now_ns()
        for action in work.actions:
            self._gauges.evaluated(action.ref, len(found.entries))
        return decide(work.stream.kind, work.actions, found, now_ns, calendar, work.event)

    async def _resolve(
        self, work: WorkItem, found: Family | LakebedError, decision: Decision, rows: list[LedgerRow]
    ) -> StreamResolution:
        if isinstance(found, LakebedError):
            return await self._failed(work, outcome_of(found), found.message, "")
        for ref, item in decision.waits:
            try:
                await self.pending.upsert(ref, [item])
            except (PendingFull, Corrupt) as error:
                await self.demote(ref, Degraded.PENDING_FULL, str(error))
            except LakebedError as error:
                return await self._failed(work, DeleteOutcome.TRANSPORT_ERROR, error.message, ref.key.rule_hash)
        answer = StreamResolution.NOOP_RESOLVED
        for deletion in decision.deletions:
            outcome, reason = await self._delete_with_tries(deletion)
            rows.append(self._row(work, deletion, outcome, reason))
            self._gauges.verdict(deletion.action.ref, outcome)
            if not resolution_of(outcome).resolved:
                return await self._failed(work, outcome, reason, deletion.action.ref.key.rule_hash)
            if outcome is DeleteOutcome.DELETED:
                answer = StreamResolution.DONE
        return answer

    async def _delete_with_tries(self, deletion: Deletion) -> tuple[DeleteOutcome, str]:
        """Deletes; a fatal error is tried a few times. So is another identity that is due all the same: a tag that no
        rule uses makes one, and no stream would act on its event.
        """
        outcome, reason = DeleteOutcome.FATAL_EVENT_ERROR, ""
        for _ in range(blockers.FATAL_TRIES):
            async with self._slots:
                outcome, reason = await self._delete(deletion)
            if outcome is DeleteOutcome.STALE_IDENTITY:
                found = await self._due_again(deletion)
                if not isinstance(found, Deletion):
                    return found, reason
                deletion, outcome = found, DeleteOutcome.TRANSPORT_ERROR
            elif outcome is not DeleteOutcome.FATAL_EVENT_ERROR:
                break
        return outcome, reason

    async def _due_again(self, deletion: Deletion) -> Deletion | DeleteOutcome:
        """The same entry as it is now, if the same action still applies; otherwise the outcome."""
        wanted, action = deletion.entry, deletion.action
        try:
            family = await self._seams.lister.look(wanted.bucket, wanted.key, wanted.upload_id)
        except LakebedError as error:
            return outcome_of(error)
        entry = next((one for one in family.entries if same_entry(one, wanted)), None)
        if entry is None:
            return DeleteOutcome.NOT_FOUND
        verb = evaluate(action.rule, action.kind, entry, self._clock.now_ns(), self._settings.calendar)
        if verb is not deletion.verb:
            return DeleteOutcome.STALE_IDENTITY
        return msgspec.structs.replace(deletion, entry=entry)

    async def _delete(self, deletion: Deletion) -> tuple[DeleteOutcome, str]:
        """One guarded delete: the policy is read again, and what the store's own check of the identity does not cover
        (which version is current, how many are left) is read again.
        """
        entry, action = deletion.entry, deletion.action
        try:
            await self._rate_limiter.wait()
            refused = guard(
                entry,
                deletion.verb,
                action.ref.key,
                action.rule,
                live=await self._live(entry),
                policy=await self._policy(entry.bucket),
                reserved=self.reserved,
                now_ns=self._clock.now_ns(),
                calendar=self._settings.calendar,
            )
            if refused is not None:
                return refused, _RESERVED if refused is DeleteOutcome.SKIPPED_RESERVED else ""
            removal = await self._dispatch(entry, deletion.verb)
        except LakebedError as error:
            return outcome_of(error), error.message
        if removal is Removal.METADATA_ONLY:
            self._gauges.metadata_only(action.ref)
            return DeleteOutcome.DELETED, _METADATA_ONLY
        return DeleteOutcome.DELETED, ""

    async def _dispatch(self, entry: ObjectEntry, verb: Verb) -> Removal:
        self._under_way += 1
        self._gauges.saturation(self._under_way / self._settings.concurrency)
        began_s = self._clock.monotonic_s()
        try:
            return await self._seams.deleter.delete(entry, verb)
        finally:
            self._under_way -= 1
            self._gauges.saturation(self._under_way / self._settings.concurrency)
            self._gauges.took(self._clock.monotonic_s() - began_s)

    async def _live(self, entry: ObjectEntry) -> tuple[ObjectEntry, ...]:
        if is_unversioned(entry):
            return (entry,)
        return (await self._seams.lister.look(entry.bucket, entry.key, entry.upload_id)).entries

    async def _policy(self, bucket: str) -> tuple[Rule, ...]:
        """The policy in force; at most `policy_fresh_s` old, since no store states it in the delete itself."""
        read_s, rules = self._policies.get(bucket, (float("-inf"), ()))
        now_s = self._clock.monotonic_s()
        if now_s - read_s < self._settings.policy_fresh_s:
            return rules
        policy = await self._seams.policies.get(bucket)
        rules = rules_of(policy.text) if policy is not None else ()
        self._policies[bucket] = (now_s, rules)
        return rules

    async def _failed(self, work: WorkItem, outcome: DeleteOutcome, error: str, rule_hash: str) -> StreamResolution:
        if outcome is DeleteOutcome.NOT_FOUND:
            return StreamResolution.NOOP_RESOLVED
        now_ns = self._clock.now_ns()

        def note(known: BlockerState) -> tuple[BlockerState, StreamResolution]:
            if outcome is DeleteOutcome.FATAL_EVENT_ERROR:
                after = blockers.block(
                    known, work.stream, bucket=work.bucket, key=work.key, now_ns=now_ns,
                    reason=outcome.value, error=error, rule_hash=rule_hash, retries=blockers.FATAL_TRIES,
                )  # fmt: skip
                return after, StreamResolution.BLOCKED
            return blockers.record_retry(
                known, work.stream, bucket=work.bucket, key=work.key, now_ns=now_ns, error=error,
                rule_hash=rule_hash, retries_max=self._settings.retries_max,
                age_max_ns=ns(self._settings.retry_age_s),
            )  # fmt: skip

        try:
            answer = await self._state.blockers.change(note)
        except LakebedError:  # without a stored record nothing may block: the next pass tries again
            return StreamResolution.RETRY_LATER
        log.warning("delete not resolved", stream=work.stream.id, key=work.key, outcome=outcome.value, error=error)
        return answer

    async def _forget(self, streams: Sequence[Stream]) -> None:
        """Removes the retry budgets of positions that were resolved."""
        snapshot = await self._state.blockers.read() if streams else None
        if snapshot is None or not any(stream.id in snapshot.value.budgets for stream in streams):
            return

        def clear(known: BlockerState) -> BlockerState:
            for stream in streams:
                known = blockers.clear_budget(known, stream)
            return known

        await self._state.blockers.change(changed(clear))

    async def demote(self, ref: ActionRef, reason: Degraded, why: str) -> None:
        """Switches the action from events to scans, durably. When the store raises, the caller's cursor stays."""
        now_ns = self._clock.now_ns()

        def lower(state: BucketLifecycle) -> BucketLifecycle:
            known = state.action(ref.key)
            if known is None or known.mode is not Mode.EVENT_DRIVEN:
                return state
            after = msgspec.structs.replace(
                known, mode=Mode.SCAN_ONLY, degraded=reason, degraded_since_ns=now_ns, next_scan_ns=now_ns
            )
            return state.having(ref.key, after)

        await self._state.bucket(ref.bucket).change(changed(lower))
        log.warning("action demoted to scans", action=str(ref), reason=reason.value, why=why)

    def _row(
        self, work: WorkItem, deletion: Deletion, outcome: DeleteOutcome | None = None, reason: str = ""
    ) -> LedgerRow:
        entry, action = deletion.entry, deletion.action
        return LedgerRow(
            at_ns=self._clock.now_ns(),
            run=self._run,
            bucket=entry.bucket,
            key=entry.key,
            rule_hash=action.ref.key.rule_hash,
            kind=action.kind,
            verb=deletion.verb.value,
            identity=entry.identity,
            stream=work.stream.id,
            rule_id=action.rule.rule_id,
            version_id=entry.version_id,
            upload_id=entry.upload_id,
            due_at_ns=deletion.due_ns,
            outcome=outcome.value if outcome else "",
            reason=reason,
        )
