"""Resolves a batch of works, whichever stream they come from: look, decide, ledger, guarded delete, ledger.

The answer per work says whether its stream may pass it. A work that cannot be resolved has fed the retry budget, or
has a durable blocker, before its answer is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from lakebed.clock import Clock
from lakebed.errors import Corrupt, LakebedError
from lakebed.ids import Ids
from lakebed.lifecycle import troubles
from lakebed.lifecycle.decide import Decision, Deletion, decide
from lakebed.lifecycle.engine import ActionRef, CompiledAction
from lakebed.lifecycle.evaluate import evaluate
from lakebed.lifecycle.gauges import Gauges
from lakebed.lifecycle.guard import guard, outcome_of, resolution_of, same_entry
from lakebed.lifecycle.home import Home
from lakebed.lifecycle.ledger import Ledger
from lakebed.lifecycle.model import Degraded, Entry, Mode, Outcome, Resolution, Rule, Verb
from lakebed.lifecycle.pace import Pace
from lakebed.lifecycle.pending import Pending, PendingFull
from lakebed.lifecycle.policies import rules_of
from lakebed.lifecycle.seams import Deleter, Event, Family, Lister, Policies, Removal
from lakebed.lifecycle.settings import LifecycleSettings, ns
from lakebed.lifecycle.shelf import Shelf, changed
from lakebed.lifecycle.state import BucketState, LedgerRow, Stream, Troubles
from lakebed.logs import logger

log = logger("lifecycle")

_METADATA_ONLY = "metadata only: its bytes go with the volume they are on"
_RESERVED = "a key that Lakebed itself keeps: no rule takes it"


class Work(msgspec.Struct, frozen=True):
    """Something of a stream to be resolved: a key (or upload) and the actions it may concern."""

    stream: Stream
    bucket: str
    key: str
    actions: tuple[CompiledAction, ...]
    upload_id: str = ""
    event: Event | None = None
    unreadable: str = ""
    family: Family | None = None  # as a listing showed it, where that is all a delete's condition needs


def stands_alone(entry: Entry) -> bool:
    """Whether its identity says everything that matters about it: an object without versions."""
    return not entry.version_id and not entry.upload_id


class Seams(msgspec.Struct, frozen=True):
    """The store that rules are run on."""

    lister: Lister
    deleter: Deleter
    policies: Policies


class Resolver:
    def __init__(self, seams: Seams, shelf: Shelf, settings: LifecycleSettings, *, run: str, home: Home) -> None:
        """`home` is what no rule may reach; `run` names this life in the ledger."""
        self._seams, self._shelf, self._settings, self._run, self.home = seams, shelf, settings, run, home
        self._clock: Clock = shelf.clock
        self._ids: Ids = shelf.ids
        self._ledger = Ledger(shelf.store, shelf.clock, shelf.ids)
        self.pending = Pending(shelf.store, shelf.ids, items_max=settings.pending_max)
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._pace = Pace(settings.deletes_per_s, shelf.clock)
        self._policies: dict[str, tuple[float, tuple[Rule, ...]]] = {}
        self._gauges = Gauges(shelf.metrics)
        self._under_way = 0

    async def settle(self, works: Sequence[Work]) -> list[Resolution]:
        """One resolution per work, in order. Raises only what the store of our own state raises."""
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

    async def _look(self, work: Work) -> Family | LakebedError:
        if work.unreadable:
            return Corrupt(f"the event cannot be read: {work.unreadable}")
        if work.family is not None:
            return work.family
        async with self._slots:
            try:
                return await self._seams.lister.look(work.bucket, work.key, work.upload_id)
            except LakebedError as error:
                return error

    def _decide(self, work: Work, found: Family | LakebedError) -> Decision:
        if isinstance(found, LakebedError):
            return Decision()
        calendar, now_ns = self._settings.calendar, self._clock.now_ns()
        for action in work.actions:
            self._gauges.evaluated(action.ref, len(found.entries))
        return decide(work.stream.kind, work.actions, found, now_ns, calendar, work.event)

    async def _resolve(
        self, work: Work, found: Family | LakebedError, decision: Decision, rows: list[LedgerRow]
    ) -> Resolution:
        if isinstance(found, LakebedError):
            return await self._failed(work, outcome_of(found), found.message, "")
        for ref, item in decision.waits:
            try:
                await self.pending.upsert(ref, [item])
            except (PendingFull, Corrupt) as error:
                await self.demote(ref, Degraded.PENDING_FULL, str(error))
            except LakebedError as error:
                return await self._failed(work, Outcome.TRANSPORT_ERROR, error.message, ref.key.rule_hash)
        answer = Resolution.NOOP_RESOLVED
        for deletion in decision.deletions:
            outcome, reason = await self._delete_with_tries(deletion)
            rows.append(self._row(work, deletion, outcome, reason))
            self._gauges.verdict(deletion.action.ref, outcome)
            if not resolution_of(outcome).resolved:
                return await self._failed(work, outcome, reason, deletion.action.ref.key.rule_hash)
            if outcome is Outcome.DELETED:
                answer = Resolution.DONE
        return answer

    async def _delete_with_tries(self, deletion: Deletion) -> tuple[Outcome, str]:
        """Deletes; a fatal error is tried a few times. So is another identity that is due all the same: a tag that no
        rule asks for makes one, and its event would be of interest to nobody.
        """
        outcome, reason = Outcome.FATAL_EVENT_ERROR, ""
        for _ in range(troubles.FATAL_TRIES):
            async with self._slots:
                outcome, reason = await self._delete(deletion)
            if outcome is Outcome.STALE_IDENTITY:
                found = await self._due_again(deletion)
                if not isinstance(found, Deletion):
                    return found, reason
                deletion, outcome = found, Outcome.TRANSPORT_ERROR
            elif outcome is not Outcome.FATAL_EVENT_ERROR:
                break
        return outcome, reason

    async def _due_again(self, deletion: Deletion) -> Deletion | Outcome:
        """The same entry as it is now, when the same action still wants the same; otherwise what that means."""
        wanted, action = deletion.entry, deletion.action
        try:
            family = await self._seams.lister.look(wanted.bucket, wanted.key, wanted.upload_id)
        except LakebedError as error:
            return outcome_of(error)
        entry = next((one for one in family.entries if same_entry(one, wanted)), None)
        if entry is None:
            return Outcome.NOT_FOUND
        verb = evaluate(action.rule, action.kind, entry, self._clock.now_ns(), self._settings.calendar)
        if verb is not deletion.verb:
            return Outcome.STALE_IDENTITY
        return msgspec.structs.replace(deletion, entry=entry)

    async def _delete(self, deletion: Deletion) -> tuple[Outcome, str]:
        """One guarded delete: the policy is read again, and what the store's own check of the identity does not cover
        (which version is current, how many are left) is looked at again.
        """
        entry, action = deletion.entry, deletion.action
        try:
            await self._pace.wait()
            refused = guard(
                entry,
                deletion.verb,
                action.ref.key,
                action.rule,
                live=await self._live(entry),
                policy=await self._policy(entry.bucket),
                home=self.home,
                now_ns=self._clock.now_ns(),
                calendar=self._settings.calendar,
            )
            if refused is not None:
                return refused, _RESERVED if refused is Outcome.SKIPPED_RESERVED else ""
            removal = await self._dispatch(entry, deletion.verb)
        except LakebedError as error:
            return outcome_of(error), error.message
        if removal is Removal.METADATA_ONLY:
            self._gauges.metadata_only(action.ref)
            return Outcome.DELETED, _METADATA_ONLY
        return Outcome.DELETED, ""

    async def _dispatch(self, entry: Entry, verb: Verb) -> Removal:
        self._under_way += 1
        self._gauges.saturation(self._under_way / self._settings.concurrency)
        began_s = self._clock.monotonic_s()
        try:
            return await self._seams.deleter.delete(entry, verb)
        finally:
            self._under_way -= 1
            self._gauges.saturation(self._under_way / self._settings.concurrency)
            self._gauges.took(self._clock.monotonic_s() - began_s)

    async def _live(self, entry: Entry) -> tuple[Entry, ...]:
        if stands_alone(entry):
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

    async def _failed(self, work: Work, outcome: Outcome, error: str, rule_hash: str) -> Resolution:
        if outcome is Outcome.NOT_FOUND:
            return Resolution.NOOP_RESOLVED
        now_ns = self._clock.now_ns()

        def note(known: Troubles) -> tuple[Troubles, Resolution]:
            if outcome is Outcome.FATAL_EVENT_ERROR:
                after = troubles.block(
                    known, work.stream, bucket=work.bucket, key=work.key, now_ns=now_ns,
                    reason=outcome.value, error=error, rule_hash=rule_hash, retries=troubles.FATAL_TRIES,
                )  # fmt: skip
                return after, Resolution.BLOCKED
            return troubles.record_retry(
                known, work.stream, bucket=work.bucket, key=work.key, now_ns=now_ns, error=error,
                rule_hash=rule_hash, retries_max=self._settings.retries_max,
                age_max_ns=ns(self._settings.retry_age_s),
            )  # fmt: skip

        try:
            answer = await self._shelf.troubles.change(note)
        except LakebedError:  # without a durable record nothing may stand still for good: the next pass tries again
            return Resolution.RETRY_LATER
        log.warning("lifecycle_held", stream=work.stream.id, key=work.key, outcome=outcome.value, error=error)
        return answer

    async def _forget(self, streams: Sequence[Stream]) -> None:
        """Success gives a place its budget back."""
        snapshot = await self._shelf.troubles.read() if streams else None
        if snapshot is None or not any(stream.id in snapshot.value.budgets for stream in streams):
            return

        def clear(known: Troubles) -> Troubles:
            for stream in streams:
                known = troubles.clear_budget(known, stream)
            return known

        await self._shelf.troubles.change(changed(clear))

    async def demote(self, ref: ActionRef, reason: Degraded, why: str) -> None:
        """From events to scans alone, durably. Raises what the store raises: the caller's cursor then stays."""
        now_ns = self._clock.now_ns()

        def lower(state: BucketState) -> BucketState:
            known = state.action(ref.key)
            if known is None or known.mode is not Mode.EVENT_DRIVEN:
                return state
            after = msgspec.structs.replace(
                known, mode=Mode.SCAN_ONLY, degraded=reason, degraded_since_ns=now_ns, next_scan_ns=now_ns
            )
            return state.having(ref.key, after)

        await self._shelf.bucket(ref.bucket).change(changed(lower))
        log.warning("lifecycle_demoted", action=str(ref), reason=reason.value, why=why)

    def _row(self, work: Work, deletion: Deletion, outcome: Outcome | None = None, reason: str = "") -> LedgerRow:
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
