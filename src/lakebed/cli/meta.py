"""`lakebed meta`: what the log coordinates through, to be looked at. Data on stdout."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import cyclopts
import msgspec
from cyclopts import Parameter

from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, by_hand, in_loop
from lakebed.errors import Invalid
from lakebed.meta.bucket import BucketMeta
from lakebed.meta.connect import connect
from lakebed.meta.model import Entry, prefix_end
from lakebed.meta.protocol import Meta
from lakebed.meta.settings import MetaSettings

R = TypeVar("R")
Group = Annotated[str, Parameter(name=["--group", "-g"], help="partition key of the group, e.g. orders:0")]

app = cyclopts.App(name="meta", help="Look into the ordered keys the log coordinates through.")


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
    prefix: Annotated[str, Parameter(help="how the keys begin")] = "llog/",
    *,
    group: Group = "",
    limit: Annotated[int, Parameter(help="entries to show at most")] = 100,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show the entries below a prefix (ending in '/'), of one group or of all."""
    end = prefix_end(prefix)
    found = _with_meta(where, lambda meta: meta.range(prefix, end, limit=limit, partition_key=group))
    emit([_shown(entry) for entry in found], output)


@app.command
def groups(*, where: Where = Where(), output: Output = "table") -> None:
    """Show the partition keys that have a head (bucket backend)."""
    found = _with_meta(where, lambda meta: _bucket(meta).groups())
    emit([{"partition_key": partition_key} for partition_key in found], output)


@app.command
def dump(
    group: Annotated[str, Parameter(help="the partition key, e.g. orders:0")],
    *,
    where: Where = Where(),
    output: Output = "json",
) -> None:
    """Show a group's head as it is stored: what is hot, what its leaves hold, who wrote last (bucket backend)."""
    head = _with_meta(where, lambda meta: _bucket(meta).head(group))
    plain = msgspec.to_builtins(head)
    plain["hot"] = [
        {**_shown(Entry(key, hot.value, str(hot.version))), "session": hot.session} for key, hot in head.hot.items()
    ]
    names = ("leaf", "first", "last", "entries", "bytes")
    plain["refs"] = [dict(zip(names, ref, strict=True)) for ref in plain["refs"]]
    emit(plain, output)


@app.command
def sweep(
    *,
    dry_run: Annotated[bool, Parameter(help="only show what would be removed", negative="")] = False,
    where: Where = Where(),
) -> None:
    """Remove leaves and sessions that nothing refers to and that are old enough (bucket backend)."""
    if dry_run:
        found = _with_meta(where, lambda meta: _bucket(meta).orphans())
        emit([{"key": key} for key in found])
        say(f"would remove {len(found)}")
        return

    async def work(meta: Meta) -> int:
        async with by_hand(where.context("meta"), "meta.sweep", {}):
            return await _bucket(meta).sweep()

    say(f"removed {_with_meta(where, work)}")


def _bucket(meta: Meta) -> BucketMeta:
    if not isinstance(meta, BucketMeta):
        raise Invalid("this is for meta.backend = 'bucket' only", hint="lakebed settings shows which one is chosen")
    return meta


def _with_meta(where: Where, ask: Callable[[Meta], Awaitable[R]]) -> R:
    async def work() -> R:
        context = where.context("meta")
        meta = connect(
            context.settings.of(MetaSettings),
            store=context.store,
            clock=context.clock,
            ids=context.ids,
            metrics=context.metrics,
        )
        try:
            return await ask(meta)
        finally:
            await meta.close()

    return in_loop(work)


def _shown(entry: Entry) -> dict[str, Any]:
    """An entry for people: its value as JSON or text where it is that."""
    try:
        value = msgspec.json.decode(entry.value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = entry.value.decode(errors="replace")
    return {"key": entry.key, "version": entry.version, "value": value}
