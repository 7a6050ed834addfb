"""All policies of all buckets, compiled: one lookup per event, whatever the number of rules.

An action takes part in reader sweeps only when it is active: its bootstrap is complete and its mode is event_driven.
Both are durable, and are written before the cursors it needs are moved back for it, under a new generation. A sweep
with a snapshot compiled before that is refused by the generation, so a snapshot compiled at any instant is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from functools import lru_cache
from typing import Generic, TypeVar

import msgspec

from lakebed.lifecycle.cluster import LogState, begins_ns, reach_hash
from lakebed.lifecycle.eligibility import action_kinds, delays, predicate_sensitive
from lakebed.lifecycle.model import ActionKey, ActionKind, Calendar, Mode, Rule, rule_hash

T = TypeVar("T")


class PrefixTrie(Generic[T]):
    """Values under prefixes; `match` gives those whose prefix begins the key, in the order of their length."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()

    def add(self, prefix: str, value: T) -> None:
        node = self._root
        for char in prefix:
            node = node.below.setdefault(char, _Node())
        node.values.append(value)

    def match(self, key: str) -> list[T]:
        node, found = self._root, list(self._root.values)
        for char in key:
            after = node.below.get(char)
            if after is None:
                break
            node = after
            found += node.values
        return found


class _Node(Generic[T]):
    __slots__ = ("below", "values")

    def __init__(self) -> None:
        self.below: dict[str, _Node[T]] = {}
        self.values: list[T] = []


class ActionRef(msgspec.Struct, frozen=True, order=True):
    """An action of a bucket. Two buckets with the same rule share its key, not its state."""

    bucket: str
    key: ActionKey

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}"


class Activation(msgspec.Struct, frozen=True):
    """The stored state of an action when it is compiled."""

    mode: Mode = Mode.DISABLED
    bootstrap_complete: bool = False
    joined: int = 0  # generation of the cursors that serve it; 0 before they were moved back for it


class CompiledAction(msgspec.Struct, frozen=True):
    ref: ActionRef
    rule: Rule
    delays_ns: tuple[int, ...]
    predicate_sensitive: bool
    mode: Mode
    active: bool
    joined: int = 0

    @property
    def kind(self) -> ActionKind:
        return self.ref.key.kind


class BucketIndex:
    """One bucket's actions, found by key. Tags are compared with the live object: an event may be older than them."""

    def __init__(self, actions: Iterable[CompiledAction]) -> None:
        self._trie: PrefixTrie[ActionRef] = PrefixTrie()
        for action in actions:
            self._trie.add(action.rule.prefix, action.ref)

    def match(self, key: str) -> list[ActionRef]:
        return self._trie.match(key)


class PolicySnapshot:
    """One compiled state of all policies. Immutable; `snapshot_id` grows with every compile of one process."""

    def __init__(
        self,
        snapshot_id: int,
        actions: Iterable[CompiledAction],
        calendar: Calendar,
        versioned: frozenset[str] = frozenset(),
        log: LogState = LogState(),
    ) -> None:
        self.snapshot_id, self.calendar, self.versioned = snapshot_id, calendar, versioned
        self.log, self.reach, self.log_begins_ns = log, reach_hash(log), begins_ns(log)
        self.actions: dict[ActionRef, CompiledAction] = {action.ref: action for action in actions}
        self.original_delay_groups: dict[int, frozenset[ActionRef]] = {}
        self.predicate_actions: frozenset[ActionRef] = frozenset()
        self.date_actions: dict[ActionRef, int] = {}
        by_bucket: dict[str, list[CompiledAction]] = {}
        groups: dict[int, set[ActionRef]] = {}
        predicate: set[ActionRef] = set()
        for action in self.actions.values():
            by_bucket.setdefault(action.ref.bucket, []).append(action)
            if action.kind is ActionKind.EXPIRATION_DATE:
                self.date_actions[action.ref] = action.rule.expiration_date_ns or 0
            if not action.active:
                continue
            for delay_ns in action.delays_ns:
                groups.setdefault(delay_ns, set()).add(action.ref)
            if action.predicate_sensitive:
                predicate.add(action.ref)
        self.original_delay_groups = {delay: frozenset(refs) for delay, refs in sorted(groups.items())}
        self.predicate_actions = frozenset(predicate)
        self._by_bucket = by_bucket
        self._indexes = {bucket: BucketIndex(found) for bucket, found in by_bucket.items()}

    @property
    def buckets(self) -> list[str]:
        return sorted(self._indexes)

    @property
    def indexed(self) -> Container[str]:
        """The buckets that have rules."""
        return self._indexes

    def of_bucket(self, bucket: str) -> list[CompiledAction]:
        return self._by_bucket.get(bucket, [])

    def match_path(self, bucket: str, key: str) -> list[CompiledAction]:
        """Every enabled action whose prefix begins the key, active or not: for scans."""
        return [self.actions[ref] for ref in self._match(bucket, key) if self.actions[ref].mode is not Mode.DISABLED]

    def match_active(self, bucket: str, key: str) -> list[CompiledAction]:
        """Every active action whose prefix begins the key: for sweeps, which choose by delay."""
        index = self._indexes.get(bucket)
        return [action for ref in index.match(key) if (action := self.actions[ref]).active] if index is not None else []

    def match_original(self, bucket: str, key: str, delay_ns: int) -> list[CompiledAction]:
        group = self.original_delay_groups.get(delay_ns, frozenset())
        return [self.actions[ref] for ref in self._match(bucket, key) if ref in group]

    def match_predicate(self, bucket: str, key: str) -> list[CompiledAction]:
        return [self.actions[ref] for ref in self._match(bucket, key) if ref in self.predicate_actions]

    def _match(self, bucket: str, key: str) -> list[ActionRef]:
        index = self._indexes.get(bucket)
        return index.match(key) if index is not None else []


def compile_policies(
    policies: Mapping[str, tuple[Rule, ...]],
    activation: Callable[[ActionRef], Activation],
    calendar: Calendar,
    *,
    snapshot_id: int = 0,
    versioned: Callable[[str], bool] = lambda _: False,
    log: LogState = LogState(),
) -> PolicySnapshot:
    """Expands every enabled rule into its actions. `activation` gives the stored state of each."""
    compiled: dict[ActionRef, CompiledAction] = {}
    for bucket, rules in policies.items():
        for rule in rules:
            if not rule.enabled:
                continue
            digest = rule_hash(rule)
            for kind in action_kinds(rule):
                ref = ActionRef(bucket, ActionKey(digest, kind))
                known = activation(ref)
                compiled[ref] = CompiledAction(
                    ref=ref,
                    rule=rule,
                    delays_ns=delays(rule, kind, calendar),
                    predicate_sensitive=needs_predicate(rule, kind, versioned(bucket)),
                    mode=known.mode,
                    active=known.bootstrap_complete and known.mode is Mode.EVENT_DRIVEN,
                    joined=known.joined,
                )
    return PolicySnapshot(snapshot_id, compiled.values(), calendar, frozenset(filter(versioned, policies)), log)


def needs_predicate(rule: Rule, kind: ActionKind, versioned: bool) -> bool:
    """Whether the action can come to apply without a new age: by tags or metadata, or, where versions exist, by the
    removal of another version that leaves a delete marker alone.
    """
    return predicate_sensitive(rule) or (versioned and kind is ActionKind.EXPIRATION_DAYS)


@lru_cache(maxsize=256)
def action_keys(rules: tuple[Rule, ...]) -> frozenset[ActionKey]:
    """What the policy wants done: a delete whose key is not here has lost its reason."""
    return frozenset(ActionKey(rule_hash(rule), kind) for rule in rules if rule.enabled for kind in action_kinds(rule))
