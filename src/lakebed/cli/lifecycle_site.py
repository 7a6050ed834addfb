"""What the commands of `lakebed lifecycle` share: how they reach a site, and the arguments that several take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter

from lakebed.cli.where import Where, by_hand, in_loop
from lakebed.errors import Invalid

R = TypeVar("R")
Bucket = Annotated[str, Parameter(help="the bucket")]
OneBucket = Annotated[str, Parameter(help="only this bucket")]
DryRunFlag = Annotated[bool, Parameter(name="--dry-run", negative="", help="only say what would be done")]
Reason = Annotated[str, Parameter(help="why; kept on record")]


def with_site(where: Where, work: Callable[[Any], Coroutine[Any, Any, R]]) -> R:
    from lakebed import logs
    from lakebed.lifecycle.workers import opened

    logs.configure("warning")

    async def run() -> R:
        async with opened(where.context("cli")) as site:
            return await work(site)

    return in_loop(run)


def acted(
    where: Where, what: str, subject: dict[str, str], work: Callable[[Any], Coroutine[Any, Any, R]], reason: str = ""
) -> R:
    """The same, on the trail."""

    async def recorded(site: Any) -> R:
        async with by_hand(where.context("cli"), f"lifecycle.{what}", subject, reason):
            return await work(site)

    return with_site(where, recorded)


def bytes_of(file: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise Invalid(f"{file} cannot be read: {error}") from error


async def policy_of(site: Any, bucket: str) -> bytes:
    from lakebed.views.lifecycle import policy

    return await policy(site, bucket)
