"""`lakebed lifecycle ttl`: buckets whose objects go to volumes that SeaweedFS drops as a whole."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import App, Parameter

from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where
from lakebed.lifecycle.commands.shared import Bucket, DryRunFlag, Reason, acted, rules_in_force, with_services

ttl = App(name="ttl", help="TTL routes of buckets: objects on volumes that are dropped as a whole.")
Prefix = Annotated[str, Parameter(help="only keys that begin with this")]


@ttl.command
def show(bucket: Bucket, *, where: Where = Where(), output: Output = "table") -> None:
    """Show the TTL routes of a bucket."""
    emit(with_services(where, lambda services: services.lake.ttl(bucket).routes()), output)


@ttl.command(name="set")
def set_route(
    bucket: Bucket,
    days: Annotated[int, Parameter(help="the TTL in days; at least the days of a rule in force for these keys")],
    *,
    prefix: Prefix = "",
    reason: Reason,
    dry_run: DryRunFlag = False,
    where: Where = Where(),
) -> None:
    """Write new objects to volumes with this TTL. The TTL holds for them regardless of later policies."""

    async def work(services: Any) -> None:
        rules = await rules_in_force(services, bucket)
        await services.lake.ttl(bucket).set(days, rules, prefix, dry_run=dry_run)

    if dry_run:
        with_services(where, work)
    else:
        acted(where, "ttl-set", {"bucket": bucket, "prefix": prefix, "days": str(days)}, work, reason)
    say(f"{bucket}/{prefix}: new objects {'would ' if dry_run else ''}get a TTL of {days} days ({reason})")


@ttl.command(name="rm")
def remove_route(bucket: Bucket, *, prefix: Prefix = "", reason: Reason, where: Where = Where()) -> None:
    """Remove a TTL route. Objects keep the TTL they were written with."""
    subject = {"bucket": bucket, "prefix": prefix}
    acted(where, "ttl-rm", subject, lambda services: services.lake.ttl(bucket).clear(prefix), reason)
    say(f"{bucket}/{prefix}: TTL route removed ({reason})")


@ttl.command
def stamp(bucket: Bucket, *, reason: Reason, where: Where = Where(), output: Output = "table") -> None:
    """Give objects that were written before the TTL routes the TTL of their route. Safe to interrupt and to repeat."""
    done = acted(
        where, "ttl-stamp", {"bucket": bucket}, lambda services: services.lake.ttl(bucket).back_stamp(), reason
    )
    emit(done, output)
