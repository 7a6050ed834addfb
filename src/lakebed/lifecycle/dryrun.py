"""What a policy would delete, before it is enabled: one walk, the worker's own evaluation, no change."""

from __future__ import annotations

from contextlib import aclosing

import msgspec

from lakebed.lifecycle.candidates import ready
from lakebed.lifecycle.decide import decide
from lakebed.lifecycle.home import Home
from lakebed.lifecycle.model import Calendar, Rule, StreamKind
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
    """How many and how much. `undecided` may go too: what they depend on (tags) the source does not show.

    `complete` is False when the walk stopped at its limit: a larger bucket is judged over a listing, by Spark.
    """

    bucket: str
    scanned: int
    count: int
    bytes: int
    locked: int
    by_action: dict[str, int]
    sample: list[Wanted]
    reserved: int = 0
    undecided: int = 0
    undecided_bytes: int = 0
    complete: bool = True
    source: str = "walk"


async def dry_run(
    lister: Lister,
    bucket: str,
    rules: tuple[Rule, ...],
    now_ns: int,
    calendar: Calendar,
    *,
    sample: int = SAMPLE_MAX,
    home: Home | None = None,
    keys_max: int = 0,
) -> DryRun:
    """What would be deleted at `now_ns`, which may lie ahead: the bucket is taken as it is now.

    `keys_max` ends the walk behind so many keys; 0 is no limit.
    """
    snapshot = ready(bucket, rules, calendar)
    scanned = count = size = locked = reserved = 0
    complete = True
    by_action: dict[str, int] = {}
    shown: list[Wanted] = []
    async with aclosing(lister.walk(bucket)) as families:
        async for family in families:
            if keys_max and scanned >= keys_max:
                complete = False
                break
            scanned += 1
            actions = snapshot.match_path(bucket, family.key)
            for one in decide(StreamKind.BOOTSTRAP, actions, family, now_ns, calendar).deletions:
                if home is not None and home.holds(bucket, one.entry.key):
                    reserved += 1
                    continue
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
    return DryRun(bucket, scanned, count, size, locked, by_action, shown, reserved, complete=complete)
