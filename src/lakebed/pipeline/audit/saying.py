"""How findings are said in Spark's SQL. Arguments are SQL too, unless they name a finding, a kind or a list."""

from __future__ import annotations

from pyspark.sql import DataFrame


def made(finding: str, kind: str, key: str, referrer: str, entry: str, reason: str, *, size: str = "") -> str:
    """A finding as SQL; key, referrer, reason and size are SQL too, `entry` is what it is about."""
    return (
        f"named_struct('finding', '{finding}', 'kind', '{kind}', 'key', {key}, 'referrer', {referrer}, 'size_bytes', "
        f"cast({size or f'{entry}.size_bytes'} as bigint), 'modified_ns', {entry}.modified_ns, 'reason', {reason})"
    )


def plain(finding: str, kind: str, reason: str, *, referrer: str = "''") -> list[str]:
    """A finding as columns, of a row that has key, size_bytes and modified_ns itself."""
    said = [f"'{finding}' as finding", f"'{kind}' as kind", "key", f"{referrer} as referrer", "size_bytes"]
    return [*said, "modified_ns", f"{reason} as reason"]


def each(entries: str, name: str, when: str, made: str) -> str:
    return f"transform(filter({entries}, {name} -> {when}), {name} -> {made})"


def exploded(rows: DataFrame, *made: str) -> DataFrame:
    return rows.selectExpr(f"explode(concat({', '.join(made)})) as f").selectExpr("f.*")


def settled(entry: str, before_ns: int) -> str:
    """Whether it was there well before the listing began; a time that is not told is taken for old."""
    return f"(coalesce({entry}.modified_ns, 0) <= {before_ns})"


def those(kind: str) -> str:
    return f"collect_list(if(kind = '{kind}', entry, null))"


def text(words: str) -> str:
    return f"'{words}'"


def nulls(types: dict[str, str]) -> list[str]:
    return [f"cast(null as {kind}) as {name}" for name, kind in types.items()]
