"""Resolves a batch of work items of any stream: look up, decide, write intents, delete guarded, write verdicts.

The resolution of an item tells whether its stream may pass it. An item that fails for now counts against the retry
budget of its stream, or has a stored blocker, before its resolution is returned. One that can never be processed is set
aside with its reason, and passed; too many of them in one stream block it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from lakebed.core.clock import Clock
from lakebed.core.errors import Corrupt, LakebedError
from lakebed.core.logs import logger
from lakebed.lifecycle import blockers
from lakebed.lifecycle.blockers import Failure
from lakebed.lifecycle.cluster import LogGap
from lakebed.lifecycle.delete_decision import Decision, Deletion, decide, guard, outcome_of, resolution_of, same_entry
from lakebed.lifecycle.eligibility import evaluate
from lakebed.lifecycle.engine import ActionRef, CompiledAction
from lakebed.lifecycle.gauges import Gauges
from lakebed.lifecycle.ledger import DeletionLedger
from lakebed.lifecycle.model import Degraded, DeleteOutcome, Mode, ObjectEntry, Rule, StreamResolution, Verb
from lakebed.lifecycle.pending import PendingFull, PendingStore
from lakebed.lifecycle.rate import DeleteRateLimiter
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.seams import ChangeEvent, Deleter, Family, Lister, Policies, Removal
from lakebed.lifecycle.settings import LifecycleSettings, ns
from lakebed.lifecycle.state import (
    ActionState,
    BlockerState,
    BucketLifecycle,
    LedgerRow,
    LifecycleState,
    PendingIndex,
    PendingItem,
    Stream,
    changed,
)
from lakebed.lifecycle.stored_policy import stored_policy

log = logger("lifecycle")
_REASONS = {
    Removal.WHOLE: "",
    Removal.METADATA_ONLY: "metadata only: the bytes are removed with their volume",
    Removal.COMPLETED: "metadata only: the upload was completed and its object uses the bytes",
}
_RESERVED = "the key belongs to Lakebed: no rule deletes it"


class WorkItem(msgspec.Struct, frozen=True):
    """A key (or upload) of a stream to resolve, and the actions that may apply to it."""

    stream: Stream
    bucket: str
    key: str
    actions: tuple[CompiledAction, ...]
    upload_id: str = ""
    event: ChangeEvent | None = None
    unreadable: str = ""
    family: Family | None = None  # as a listing showed it: the delete is guarded by what is live
    gaps: tuple[LogGap, ...] = ()  # times whose events are missing from the log


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
        self._rate_limiter = DeleteRateLimiter(settings.deletes_per_s, state)
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
        waiting = await self._wait(decisions)
        rows: list[LedgerRow] = []
        ends = await asyncio.gather(
            *(
                self._resolve(work, found, decision, rows, waiting)
                for work, found, decision in zip(works, looked, decisions, strict=True)
            )
        )
        if rows:
            await self._ledger.append(rows)
        await self._rule_was_away({row.bucket for row in rows if row.outcome == DeleteOutcome.STALE_POLICY.value})
        return await self._record(works, ends)

    async def _rule_was_away(self, buckets: Iterable[str]) -> None:
        """What is passed because its rule is not in force is due again when the rule comes back, perhaps before anyone
        has compiled the policies without it: the bucket needs a scan then.
        """

        def rescan(state: BucketLifecycle) -> BucketLifecycle:
            return state if state.rescan else msgspec.structs.replace(state, rescan=True)

        for bucket in sorted(buckets):
            await self._state.bucket(bucket).change(changed(rescan))

    async def _wait(self, decisions: Sequence[Decision]) -> dict[ActionRef, LakebedError]:
        """Stores the exceptions, one write for each action; returns the errors. A full list demotes its action."""
        wanted: dict[ActionRef, list[PendingItem]] = {}
        for decision in decisions:
            for ref, item in decision.waits:
                wanted.setdefault(ref, []).append(item)
        failed: dict[ActionRef, LakebedError] = {}
        for ref, items in wanted.items():
            try:
                await self._index(ref)
                await self.pending.upsert(ref, items)
            except (PendingFull, Corrupt) as error:
                await self.demote(ref, Degraded.PENDING_FULL, str(error))
            except LakebedError as error:
                failed[ref] = error
        return failed

    async def _index(self, ref: ActionRef) -> None:
        """Says that the action may have exceptions, before it has one."""
        if str(ref) in (await self._state.pending.read()).value.refs:
            return

        def add(known: PendingIndex) -> PendingIndex:
            return msgspec.structs.replace(known, refs=tuple(sorted({*known.refs, str(ref)})))

        await self._state.pending.change(changed(add))

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
        return decide(work.actions, found, now_ns, calendar, work.event, work.gaps)

    async def _resolve(
        self,
        work: WorkItem,
        found: Family | LakebedError,
        decision: Decision,
        rows: list[LedgerRow],
        waiting: Mapping[ActionRef, LakebedError],
    ) -> StreamResolution | Failure:
        if isinstance(found, LakebedError):
            return self._failure(work, outcome_of(found), found.message, "")
        for ref, _ in decision.waits:
            if ref in waiting:
                error = waiting[ref].message
                return self._failure(work, DeleteOutcome.TRANSPORT_ERROR, error, ref.key.rule_hash)
        answer = StreamResolution.NOOP_RESOLVED
        for deletion in decision.deletions:
            deletion, outcome, reason = await self._delete_with_tries(deletion)
            rows.append(self._row(work, deletion, outcome, reason))
            self._gauges.verdict(deletion.action.ref, outcome)
            if not resolution_of(outcome).resolved:
                return self._failure(work, outcome, reason, deletion.action.ref.key.rule_hash)
            if outcome is DeleteOutcome.DELETED:
                answer = StreamResolution.DONE
        return answer

    def _failure(
        self, work: WorkItem, outcome: DeleteOutcome, error: str, rule_hash: str
    ) -> StreamResolution | Failure:
        if outcome is DeleteOutcome.NOT_FOUND:
            return StreamResolution.NOOP_RESOLVED
        log.warning("delete not resolved", stream=work.stream.id, key=work.key, outcome=outcome.value, error=error)
        return Failure(work.stream, work.bucket, work.key, outcome.value, error, rule_hash)

    async def _delete_with_tries(self, deletion: Deletion) -> tuple[Deletion, DeleteOutcome, str]:
        """Deletes; a fatal error is tried a few times. So is another identity that is due all the same: a tag that no
        rule uses makes one, and no stream would act on its event. Returns the deletion as it was tried last.
        """
        outcome, reason = DeleteOutcome.FATAL_EVENT_ERROR, ""
        for _ in range(blockers.FATAL_TRIES):
            async with self._slots:
                outcome, reason = await self._delete(deletion)
            if outcome is DeleteOutcome.STALE_IDENTITY:
                found = await self._due_again(deletion)
                if not isinstance(found, Deletion):
                    return deletion, found, reason
                deletion, outcome = found, DeleteOutcome.TRANSPORT_ERROR
            elif outcome is not DeleteOutcome.FATAL_EVENT_ERROR:
                break
        return deletion, outcome, reason

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
        """One guarded delete: the policy is read again, and what the deleter's own check does not cover."""
        entry, action = deletion.entry, deletion.action
        try:
            await self._rate_limiter.wait()
            refused = guard(
                entry,
                deletion.verb,
                action.ref.key,
                action.rule,
                live=await self._live(deletion),
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
        if removal is not Removal.WHOLE:
            self._gauges.metadata_only(action.ref)
        return DeleteOutcome.DELETED, _REASONS[removal]

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

    async def _live(self, deletion: Deletion) -> tuple[ObjectEntry, ...]:
        """What the deleter itself does not read again and compare: how many newer versions there are, and which is the
        successor of a version that does not say since when it is noncurrent. It may have been current meanwhile.
        """
        entry = deletion.entry
        if deletion.action.rule.newer_noncurrent is None and entry.since_noted:
            return (entry,)
        return (await self._seams.lister.look(entry.bucket, entry.key, entry.upload_id)).entries

    async def _policy(self, bucket: str) -> tuple[Rule, ...]:
        """The policy in force; at most `policy_fresh_s` old, since no store states it in the delete itself."""
        read_s, rules = self._policies.get(bucket, (float("-inf"), ()))
        now_s = self._clock.monotonic_s()
        if now_s - read_s < self._settings.policy_fresh_s:
            return rules
        policy = await self._seams.policies.get(bucket)
        rules = stored_policy(policy.text).rules if policy is not None else ()  # what cannot be read is not wanted
        self._policies[bucket] = (now_s, rules)
        return rules

    async def _record(
        self, works: Sequence[WorkItem], ends: Sequence[StreamResolution | Failure]
    ) -> list[StreamResolution]:
        """Puts the failures on record, and removes what is on record of streams that were resolved, in one write."""
        failures = [end for end in ends if isinstance(end, Failure)]
        done = [work.stream for work, end in zip(works, ends, strict=True) if not isinstance(end, Failure)]
        known = (await self._state.blockers.read()).value
        if not failures and blockers.cleared(known, done) is known:
            return [end for end in ends if not isinstance(end, Failure)]
        limits = blockers.Limits(self._settings.retries_max, ns(self._settings.retry_age_s))
        now_ns = self._clock.now_ns()

        def note(state: BlockerState) -> tuple[BlockerState, dict[str, StreamResolution]]:
            return blockers.recorded(blockers.cleared(state, done), failures, now_ns, limits)

        try:
            answers = await self._state.blockers.change(note)
        except LakebedError:  # without a stored record nothing may block or be passed: the next pass tries again
            answers = {failure.stream.id: StreamResolution.RETRY_LATER for failure in failures}
        return [answers[end.stream.id] if isinstance(end, Failure) else end for end in ends]

    async def demote(self, ref: ActionRef, reason: Degraded, why: str) -> None:
        """Switches the action from events to scans, durably. When the store raises, the caller's cursor stays."""
        now_ns = self._clock.now_ns()

        def lower(state: BucketLifecycle) -> BucketLifecycle:
            known = state.action(ref.key) or ActionState()
            if known.mode is not Mode.EVENT_DRIVEN:
                return state
            after = msgspec.structs.replace(
                known, mode=Mode.SCAN_ONLY, degraded=reason, degraded_since_ns=now_ns, next_scan_ns=now_ns
            )
            return state.having(ref.key, after)

        await self._state.bucket(ref.bucket).change(changed(lower))
        log.warning("action demoted to scans", action=str(ref), reason=reason.value, error=why)

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
