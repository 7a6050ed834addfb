"""The options of a read, parsed from Spark's text options. Pure; raises Invalid naming the option that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec

from lakebed.core.errors import Invalid
from lakebed.core.feed import Limit

Unreadable = Literal["fail", "skip", "keep"]
SECRETS = ("secret", "access_key", "password", "token")
LIMITS = {"max_objects": "objects", "max_rows": "rows", "max_bytes": "size_bytes"}


class ReadOptions(msgspec.Struct, frozen=True):
    """`own` are the feed's options, `flags` settings given in place (`store.url`), `tasks` 0 means as many as fit."""

    own: dict[str, str]
    columns: tuple[str, ...] = ()
    limit: Limit = Limit()
    unreadable: Unreadable = "fail"
    tasks: int = 0
    config: Path | None = None
    dir: Path | None = None
    flags: dict[str, Any] = {}


def read_options(options: Mapping[str, str], own: tuple[str, ...], ignored: tuple[str, ...] = ()) -> ReadOptions:
    """`own` names the options of this source beside those that all have, `ignored` those that Spark adds."""
    given = {name.lower(): value for name, value in options.items()}
    for name in given:
        if any(word in name for word in SECRETS):
            raise Invalid(
                f"option {name!r}: credentials are never options, because options show in plans",
                hint="set them in the environment or in lakebed.toml, or lakebed.spark.register(spark, settings)",
            )
    unreadable = given.pop("unreadable", "fail")
    if unreadable not in get_args(Unreadable):
        raise Invalid(f"option unreadable: {unreadable!r} is none of {', '.join(get_args(Unreadable))}")
    limit = Limit(**{field: _count(name, given.pop(name)) for name, field in LIMITS.items() if name in given})
    found = ReadOptions(
        own={name: given.pop(name) for name in own if name in given},
        columns=tuple(filter(None, (name.strip() for name in given.pop("columns", "").split(",")))),
        limit=limit,
        unreadable=cast(Unreadable, unreadable),
        tasks=_count("tasks", given.pop("tasks", "0")),
        config=_path(given.pop("config", "")),
        dir=_path(given.pop("dir", "")),
        flags={name: given.pop(name) for name in list(given) if "." in name},
    )
    for name in ("path", *ignored):  # Spark's own, of load(path)
        given.pop(name, None)
    if given:
        known = ", ".join(sorted((*own, *LIMITS, "columns", "unreadable", "tasks", "config", "dir")))
        raise Invalid(f"there is no option {min(given)!r}", hint=f"known: {known}, and settings such as store.url")
    return found


def _count(name: str, text: str) -> int:
    if not text.isdigit():
        raise Invalid(f"option {name}: {text!r} is no number")
    return int(text)


def _path(text: str) -> Path | None:
    return Path(text) if text else None
