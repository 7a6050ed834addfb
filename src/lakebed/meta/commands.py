"""`lakebed meta`: inspect the meta store of the log. Data on stdout."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import cyclopts
import msgspec
from cyclopts import Parameter

from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, as_operator, in_loop
from lakebed.core.errors import Invalid
from lakebed.meta.bucket.backend import BucketMeta
from lakebed.meta.bucket.bins import member_of
from lakebed.meta.bucket.model import SEPARATOR
from lakebed.meta.bucket.model import plain as plain_key
from lakebed.meta.connect import connect
from lakebed.meta.model import MetaEntry, prefix_end
from lakebed.meta.protocol import Meta
from lakebed.meta.settings import MetaSettings

R = TypeVar("R")
Group = Annotated[str, Parameter(name=["--group", "-g"], help="partition key of the group, e.g. orders:0")]

app = cyclopts.App(name="meta", help="Inspect the ordered keys the log coordinates through.")


@app.command
def get(
    key: Annotated[str, Parameter(help="the key")],
    *,
    group: Group = "",
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show one entry."""
    emit(_shown(_with_meta(where, lambda meta: meta.get(key, partition_key=group))), output)


@app.command
def scan(
    prefix: Annotated[str, Parameter(help="prefix of the keys")] = "llog/",
    *,
    group: Group = "",
    limit: Annotated[int, Parameter(help="maximum number of entries")] = 100,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show the entries below a prefix (ending in '/'), of one group or of all."""
    end = prefix_end(prefix)
    found = _with_meta(where, lambda meta: meta.range(prefix, end, limit=limit, partition_key=group))
    emit([_shown(entry) for entry in found], output)


@app.command
def groups(*, where: Where = Where(), output: Output = "table") -> None:
    """List the partition keys that have a head (bucket backend)."""
    found = _with_meta(where, lambda meta: _bucket(meta).groups())
    emit([{"partition_key": partition_key} for partition_key in found], output)


@app.command
def dump(
    group: Annotated[str, Parameter(help="the partition key, e.g. orders:0")],
    *,
    where: Where = Where(),
    output: Output = "json",
) -> None:
    """Show a group's hot entries, and the head that it shares with its `members` (bucket backend)."""
    head = _with_meta(where, lambda meta: _bucket(meta).head(group))
    plain = msgspec.to_builtins(head)
    plain["hot"] = [
        {**_shown(MetaEntry(plain_key(key), hot.value, str(hot.version))), "session": hot.session}
        for key, hot in head.hot.items()
        if not head.members or member_of(key) == group
    ]
    names = ("leaf", "first", "last", "entries", "bytes")
    plain["refs"] = [dict(zip(names, ref, strict=True)) for ref in plain["refs"]]
    for ref in plain["refs"]:
        ref |= {end: ref[end].replace(SEPARATOR, " ") for end in ("first", "last")}
    emit(plain, output)


@app.command
def sweep(
    *,
    dry_run: Annotated[bool, Parameter(help="only show what would be deleted", negative="")] = False,
    where: Where = Where(),
) -> None:
    """Delete leaves and sessions that nothing refers to and that are old enough (bucket backend)."""
    if dry_run:
        found = _with_meta(where, lambda meta: _bucket(meta).orphans())
        emit([{"key": key} for key in found])
        say(f"would delete {len(found)}")
        return

    async def work(meta: Meta) -> int:
        async with as_operator(where.context("meta"), "meta.sweep", {}):
            return await _bucket(meta).sweep()

    say(f"deleted {_with_meta(where, work)}")


def _bucket(meta: Meta) -> BucketMeta:
    if not isinstance(meta, BucketMeta):
        raise Invalid("this command needs meta.backend = 'bucket'", hint="lakebed settings meta shows the backend")
    return meta


def _with_meta(where: Where, call: Callable[[Meta], Awaitable[R]]) -> R:
    async def work() -> R:
        context = where.context("meta")
        meta = connect(context.settings.of(MetaSettings), context)
        try:
            return await call(meta)
        finally:
            await meta.close()

    return in_loop(work)


def _shown(entry: MetaEntry) -> dict[str, Any]:
    """An entry for output: its value as JSON or text where possible."""
    try:
        value = msgspec.json.decode(entry.value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = entry.value.decode(errors="replace")
    return {"key": entry.key, "version": entry.version, "value": value}
