"""What the commands of `lakebed lifecycle` share: opening the services, and common arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter

from lakebed.cli.where import Where, as_operator, in_loop
from lakebed.core.errors import Invalid

R = TypeVar("R")


def _bucket_name(_kind: object, name: str) -> None:
    from lakebed.lifecycle.paths import checked_bucket

    checked_bucket(name)


Bucket = Annotated[str, Parameter(help="the bucket", validator=_bucket_name)]
OneBucket = Annotated[str, Parameter(help="only this bucket")]
DryRunFlag = Annotated[bool, Parameter(name="--dry-run", negative="", help="show what would be done, change nothing")]
Reason = Annotated[str, Parameter(help="why; recorded in the audit trail")]


def with_services(where: Where, work: Callable[[Any], Coroutine[Any, Any, R]]) -> R:
    from lakebed.core import logs
    from lakebed.lifecycle.workers import open_services

    logs.configure("warning")

    async def run() -> R:
        async with open_services(where.context("cli")) as services:
            return await work(services)

    return in_loop(run)


def acted(
    where: Where, what: str, subject: dict[str, str], work: Callable[[Any], Coroutine[Any, Any, R]], reason: str = ""
) -> R:
    """The same, recorded in the audit trail."""

    async def recorded(services: Any) -> R:
        async with as_operator(where.context("cli"), f"lifecycle.{what}", subject, reason):
            return await work(services)

    return with_services(where, recorded)


def bytes_of(file: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise Invalid(f"{file} cannot be read: {error}") from error


async def policy_of(services: Any, bucket: str) -> bytes:
    from lakebed.lifecycle.view import policy

    return await policy(services, bucket)


async def rules_in_force(services: Any, bucket: str) -> tuple[Any, ...]:
    """The rules that run: one that cannot be read takes out itself only. Raises NotFound."""
    from lakebed.lifecycle.stored_policy import stored_policy

    return stored_policy(await policy_of(services, bucket)).rules
