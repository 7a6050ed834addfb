"""TTL routes of a bucket: new objects under a prefix go to volumes that SeaweedFS drops as a whole.

A route is a line of the filer's `filer.conf`, changed by a conditional write, so that two operators lose nothing. It
only holds for objects written later. `back_stamp` gives the earlier ones the same TTL: the filer then removes them,
with their bytes, when it next meets them after that time. Their bytes are on ordinary volumes, so a stamped entry is
marked, and a lifecycle delete removes its bytes too.

A TTL is fixed when an object is written: it takes no notice of a later policy, of tags or of versions. So a route needs
a rule in force that expires everything under its prefix no later, and a bucket without versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from lakebed.core.errors import Conflict, Corrupt, Invalid, NotFound, Stale
from lakebed.filer import s3
from lakebed.filer.client import FilerClient
from lakebed.filer.codec import with_ttl
from lakebed.filer.model import Attributes, Clause, ConditionKind, FilerEntry, Mutation, MutationKind, Transaction
from lakebed.lifecycle.model import DAY_S, Rule
from lakebed.lifecycle.seaweed.deletes import CONF_FOLDER, CONF_NAME

ATTEMPTS = 5  # of a change of the routes, when others change them too
STAMPS_AT_ONCE = 16


class TtlRoute(msgspec.Struct, frozen=True):
    prefix: str  # below the bucket
    ttl: str


class BackStamp(msgspec.Struct, frozen=True):
    """What one pass did. `changed` were changed by others meanwhile: the next pass takes them."""

    files: int = 0
    stamped: int = 0
    changed: int = 0


class BucketTtl:
    def __init__(self, filer: FilerClient, bucket: str) -> None:
        self._filer, self._bucket = filer, bucket
        self._root = f"{s3.bucket_path(bucket)}/"

    async def routes(self) -> list[TtlRoute]:
        """The bucket's routes, by prefix."""
        _, conf = await self._conf()
        found = [(_prefix(one), str(one.get("ttl", ""))) for one in conf["locations"]]
        mine = [(path.removeprefix(self._root), ttl) for path, ttl in found if ttl and path.startswith(self._root)]
        return [TtlRoute(prefix, ttl) for prefix, ttl in sorted(mine)]

    async def set(self, days: int, rules: tuple[Rule, ...], prefix: str = "", *, dry_run: bool = False) -> None:
        """Routes what is written under the prefix from now on; a dry run only checks.

        Raises Invalid when no rule in force expires all of it in that time, Conflict for a bucket with versions or
        object lock, NotFound when there is no such bucket.
        """
        bucket = await self._filer.lookup(s3.BUCKETS, self._bucket)
        if s3.versioning_of(bucket):
            raise Conflict(f"{self._bucket} keeps versions: a TTL would remove them regardless of their rules")
        if not any(_covers(rule, prefix, days) for rule in rules):
            raise Invalid(
                f"no rule of {self._bucket} expires everything under {prefix!r} within {days} days",
                hint="put an enabled rule with Expiration Days of at most that, and no filter but the prefix",
            )
        if not dry_run:
            await self._change(f"{self._root}{prefix}", {"ttl": f"{days}d"})

    async def clear(self, prefix: str = "") -> None:
        """Takes the route away. Objects keep the TTL they were written with."""
        await self._change(f"{self._root}{prefix}", None)

    async def back_stamp(self) -> BackStamp:
        """Gives files that were written before the routes the TTL of their route. Safe to interrupt and to repeat: a
        file that has a TTL is left alone. Each is changed only if nobody changed it meanwhile.
        """
        routes = await self.routes()
        total, batch = BackStamp(), list[tuple[str, FilerEntry, int]]()
        for route in routes:
            async for folder, entry in self._files(route.prefix):
                path = f"{folder}/{entry.name}".removeprefix(self._root)
                best = max((one for one in routes if path.startswith(one.prefix)), key=lambda one: len(one.prefix))
                if best != route:
                    continue
                total = msgspec.structs.replace(total, files=total.files + 1)
                if entry.attributes.ttl_s == 0:
                    batch.append((folder, entry, _seconds(route.ttl)))
                if len(batch) >= STAMPS_AT_ONCE:
                    total, batch = await self._stamped(total, batch), []
        return await self._stamped(total, batch)

    async def _stamped(self, total: BackStamp, batch: list[tuple[str, FilerEntry, int]]) -> BackStamp:
        done = sum(await asyncio.gather(*(self._stamp(*one) for one in batch)))
        return BackStamp(total.files, total.stamped + done, total.changed + len(batch) - done)

    async def _stamp(self, folder: str, entry: FilerEntry, ttl_s: int) -> bool:
        stamped = with_ttl(entry, ttl_s, {s3.EXPIRES_S3: b"true", s3.BACK_STAMPED: b"true"})
        path = f"{folder}/{entry.name}"
        change = Mutation(MutationKind.PUT, folder, entry.name, stamped)
        same = Clause(ConditionKind.ENTRY_EQUAL, expected=entry.raw)
        try:
            await self._filer.transact(Transaction(path, (same,), (change,)))
        except (Stale, NotFound):
            return False
        return True

    async def _files(self, prefix: str) -> AsyncIterator[tuple[str, FilerEntry]]:
        """Every file under the prefix, with its folder; not the uploads."""
        parent, _, start = f"{self._root}{prefix}".rpartition("/")
        waiting = [(parent, start)]
        while waiting:
            folder, start = waiting.pop()
            async for entry in self._filer.entries(folder, prefix=start):
                if not entry.is_directory:
                    yield folder, entry
                elif (folder, entry.name) != (self._root.rstrip("/"), s3.UPLOADS):
                    waiting.append((f"{folder}/{entry.name}", ""))

    async def _change(self, path: str, fields: dict[str, str] | None) -> None:
        for _ in range(ATTEMPTS):
            held, conf = await self._conf()
            known = next((one for one in conf["locations"] if _prefix(one) == path), {"locationPrefix": path})
            others = [one for one in conf["locations"] if _prefix(one) != path]
            if fields is None:
                known = {key: value for key, value in known.items() if key != "ttl"}
            location = known | (fields or {})
            keeps = len(location) > 1  # a location without anything but its prefix has no effect
            text = msgspec.json.encode(conf | {"locations": [*others, *([location] if keeps else [])]})
            made = FilerEntry(
                CONF_NAME,
                attributes=Attributes(len(text), _later(held), _later(held), 0o644),
                content=text,
            )
            clause = Clause(ConditionKind.ENTRY_EQUAL, expected=held.raw) if held else Clause(ConditionKind.NOT_EXISTS)
            put = Mutation(MutationKind.PUT, CONF_FOLDER, CONF_NAME, made)
            try:
                return await self._filer.transact(Transaction(f"{CONF_FOLDER}/{CONF_NAME}", (clause,), (put,)))
            except Stale:
                continue
        raise Conflict(f"{CONF_FOLDER}/{CONF_NAME} was changed by others {ATTEMPTS} times", hint="run it again")

    async def _conf(self) -> tuple[FilerEntry | None, dict[str, Any]]:
        try:
            held = await self._filer.lookup(CONF_FOLDER, CONF_NAME)
        except NotFound:
            return None, {"version": 1, "locations": []}
        try:
            conf = msgspec.json.decode(held.content) if held.content.strip() else {}
        except msgspec.DecodeError as error:
            raise Corrupt(f"{CONF_FOLDER}/{CONF_NAME} cannot be understood: {error}") from error
        if held.chunks or not isinstance(conf, dict) or not isinstance(conf.get("locations", []), list):
            raise Corrupt(f"{CONF_FOLDER}/{CONF_NAME} is not the filer's configuration")
        return held, {"version": 1, "locations": []} | conf


def _prefix(location: dict[str, Any]) -> str:
    return str(location.get("locationPrefix") or location.get("location_prefix") or "")


def _covers(rule: Rule, prefix: str, days: int) -> bool:
    filtered = rule.tags or rule.size_greater_than is not None or rule.size_less_than is not None
    expires = rule.expiration_days is not None and rule.expiration_days <= days
    return rule.enabled and not filtered and prefix.startswith(rule.prefix) and expires


def _seconds(ttl: str) -> int:
    """Of a route that we, or SeaweedFS's shell, wrote: minutes when there is no unit. Raises Corrupt."""
    units = {"m": 60, "h": 3600, "d": DAY_S, "w": 7 * DAY_S, "M": 30 * DAY_S, "y": 365 * DAY_S}
    number, unit = (ttl[:-1], ttl[-1:]) if ttl[-1:] in units else (ttl, "m")
    if not number.isdigit() or not int(number):
        raise Corrupt(f"a TTL route has the invalid TTL {ttl!r}")
    return int(number) * units[unit]


def _later(held: FilerEntry | None) -> int:
    """A time for the new configuration; the filer does not use it, and it grows with every change."""
    return held.attributes.mtime_ns + 1_000_000_000 if held else 1_000_000_000
