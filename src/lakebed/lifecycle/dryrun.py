"""What a policy would delete, before it is enabled: one walk, the worker's own evaluation, no change."""

from __future__ import annotations

from contextlib import aclosing

import msgspec

from lakebed.lifecycle.decide import decide
from lakebed.lifecycle.engine import Activation, compile_policies
from lakebed.lifecycle.model import Calendar, Mode, Rule, StreamKind
from lakebed.lifecycle.seams import Lister

SAMPLE_MAX = 20


class Wanted(msgspec.Struct, frozen=True):
    """One thing that would go."""

    key: str
    verb: str
    kind: str
    rule: str
    size: int
    due_at_ns: int
    version_id: str = ""
    upload_id: str = ""


class DryRun(msgspec.Struct, frozen=True):
    bucket: str
    scanned: int
    count: int
    bytes: int
    locked: int
    by_action: dict[str, int]
    sample: list[Wanted]


async def dry_run(
    lister: Lister, bucket: str, rules: tuple[Rule, ...], now_ns: int, calendar: Calendar, *, sample: int = SAMPLE_MAX
) -> DryRun:
    """What would be deleted at `now_ns`, which may lie ahead: the bucket is taken as it is now."""
    ready = Activation(Mode.EVENT_DRIVEN, True)
    snapshot = compile_policies({bucket: rules}, lambda _: ready, calendar)
    scanned = count = size = locked = 0
    by_action: dict[str, int] = {}
    shown: list[Wanted] = []
    async with aclosing(lister.walk(bucket)) as families:
        async for family in families:
            scanned += 1
            actions = snapshot.match_path(bucket, family.key)
            for one in decide(StreamKind.BOOTSTRAP, actions, family, now_ns, calendar).deletions:
                if one.entry.locked:
                    locked += 1
                    continue
                count += 1
                size += one.entry.size
                name = f"{one.action.rule.rule_id or one.action.ref.key.rule_hash}/{one.action.kind.value}"
                by_action[name] = by_action.get(name, 0) + 1
                if len(shown) < sample:
                    shown.append(
                        Wanted(
                            one.entry.key,
                            one.verb.value,
                            one.action.kind.value,
                            one.action.rule.rule_id,
                            one.entry.size,
                            one.due_ns,
                            one.entry.version_id,
                            one.entry.upload_id,
                        )
                    )
    return DryRun(bucket, scanned, count, size, locked, by_action, shown)
