"""`lakebed lifecycle`: what rules do, and what an operator decides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from lakebed.cli.jobs import spark_progress
from lakebed.cli.lifecycle_blockers import blockers
from lakebed.cli.lifecycle_rules import rules
from lakebed.cli.lifecycle_site import Bucket, DryRunFlag, OneBucket, Reason, acted, bytes_of, policy_of, with_site
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, in_loop
from lakebed.errors import NotFound

app = App(name="lifecycle", help="Expiration rules that really run.")
app.command(rules)
app.command(blockers)

Key = Annotated[str, Parameter(help="the object's key")]
Action = Annotated[str, Parameter(help="the action, or how its name begins, as `lakebed lifecycle status` shows it")]
Days = Annotated[float, Parameter(help="days between two scans")]
Limit = Annotated[int, Parameter(help="rows to show at most")]
Resume = Annotated[bool, Parameter(help="let them go on", negative="")]


# Looking.


@app.command
def status(
    bucket: OneBucket = "",
    *,
    limit: Annotated[int, Parameter(help="actions to show at most")] = 500,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show mode, health and progress of every action, or of one bucket's."""
    found = with_site(where, lambda site: site.operator.status(bucket, limit=max(1, limit)))
    emit(found, output)
    if not found:
        say("no rule is at work yet: a worker takes up a policy within lifecycle.poll_s (lakebed lifecycle rules ls)")
    if len(found) >= limit:
        say(f"the first {limit} actions: name a bucket, or raise --limit, to see others")


@app.command(name="dry-run")
def dry_run_command(
    bucket: Bucket,
    *,
    policy: Annotated[
        Path | None, Parameter(name=["--rules", "--policy"], help="judge this policy instead of the one in force")
    ] = None,
    days_ahead: Annotated[float, Parameter(help="judge as if this many days had passed")] = 0.0,
    engine: Annotated[
        Literal["walk", "spark"], Parameter(help="walk the bucket here, or list and judge it with Spark")
    ] = "walk",
    inventory: Annotated[
        str, Parameter(help="judge an S3 Inventory report instead of a listing: its manifest.json, s3://… or a file")
    ] = "",
    keep: Annotated[
        bool, Parameter(negative="", help="keep what Spark finds as a table, for `lakebed lifecycle apply`")
    ] = False,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show what a policy would delete now: how many, how many bytes, by which rule, with a sample. Deletes nothing."""
    from lakebed.views.lifecycle import preview

    text = bytes_of(policy) if policy else None
    if engine == "walk" and not inventory and not keep:
        emit(with_site(where, lambda site: preview(site, bucket, text, days_ahead=days_ahead)), output)
        return
    from lakebed.views.lifecycle_scan import scan

    known = text if text is not None else with_site(where, lambda site: policy_of(site, bucket))
    with spark_progress("scan"):
        told = scan(where.context("cli"), bucket, known, days_ahead=days_ahead, inventory=inventory, keep=keep)
    emit(told, output)


@app.command(name="apply")
def apply_candidates(bucket: Bucket, *, reason: Reason, dry_run: DryRunFlag = False, where: Where = Where()) -> None:
    """Delete what the last kept scan found, each looked at anew and guarded as always; what no rule wants now stays."""
    from lakebed.views.lifecycle_scan import apply, found

    if dry_run:
        say(f"{bucket}: {with_site(where, lambda site: found(site, bucket))} candidates would be looked at")
        return
    done = acted(where, "apply", {"bucket": bucket}, lambda site: apply(site, bucket), reason)
    say(f"{bucket}: {done.keys} keys, {done.deleted} deleted, {done.passed} passed, {done.held} held ({reason})")


@app.command
def streams(*, where: Where = Where(), output: Output = "table") -> None:
    """Show where each cursor of the event stream is, and how far behind."""
    from lakebed.views.lifecycle import streams as told

    emit(in_loop(lambda: told(where.context("cli"))), output)


@app.command
def ledger(bucket: Bucket, *, limit: Limit = 100, where: Where = Where(), output: Output = "table") -> None:
    """Show the last verdicts on a bucket's objects."""
    from lakebed.views.lifecycle import ledger as last

    context = where.context("cli")
    emit(in_loop(lambda: last(context, bucket, limit=max(1, limit))), output)


@app.command
def why(bucket: Bucket, key: Key, *, where: Where = Where(), output: Output = "table") -> None:
    """Show everything lifecycle ever decided about one key."""
    found = _rows(where, bucket, key)
    if not found and with_site(where, lambda site: _is_home(site, bucket, key)):
        raise NotFound(f"{bucket}/{key} is a key of Lakebed's own: no rule ever takes it")
    if not found:
        raise NotFound(f"lifecycle never decided anything about {bucket}/{key}")
    emit(found, output)


async def _is_home(site: Any, bucket: Bucket, key: str) -> bool:
    held: bool = site.home.holds(bucket, key)
    return held


def _rows(where: Where, bucket: Bucket, key: str) -> list[dict[str, Any]]:
    from lakebed.lifecycle.ledger import Ledger
    from lakebed.views.lifecycle import told

    async def work(site: Any) -> list[dict[str, Any]]:
        book = Ledger(site.shelf.store, site.shelf.clock, site.shelf.ids)
        return [told(row) async for row in book.rows(bucket, key=key)]

    return with_site(where, work)


# Acting.


@app.command
def run(*, where: Where = Where(), output: Output = "table") -> None:
    """Run one round of everything, now: walks, sweeps, drains."""

    async def work(site: Any) -> Any:
        return await site.worker.tick()

    emit(acted(where, "run", {}, work), output)


@app.command
def pause(bucket: Bucket, action: Action = "", *, resume: Resume = False, where: Where = Where()) -> None:
    """Pause a bucket's actions, all or those whose name begins so; --resume lets them go on, from a new walk."""
    names = acted(
        where,
        "go-on" if resume else "pause",
        {"bucket": bucket, "action": action},
        lambda site: site.operator.pause(bucket, action, paused=not resume),
    )
    say(f"{bucket}: {len(names)} actions {'go on' if resume else 'paused'}")


@app.command
def rebootstrap(bucket: Bucket, action: Action = "", *, where: Where = Where()) -> None:
    """Have a bucket walked now and its actions begun anew: all, or those whose name begins so."""

    async def work(site: Any) -> None:
        await site.operator.rebootstrap(bucket, action)
        await site.operator.wake("cli")

    acted(where, "walk", {"bucket": bucket, "action": action}, work)
    say(f"{bucket}: a walk is asked for")


@app.command
def cadence(bucket: Bucket, action: Action, days: Days, *, where: Where = Where()) -> None:
    """Set how often an action's safety scan runs, in days; 0 gives the default of its kind back."""

    async def work(site: Any) -> list[str]:
        every_ns = round(days * site.settings.calendar.day_ns)
        names: list[str] = await site.operator.cadence(bucket, action, every_ns)
        return names

    subject = {"bucket": bucket, "action": action, "days": f"{days:g}"}
    say(f"{bucket}: {len(acted(where, 'cadence', subject, work))} actions")


@app.command
def reseed(
    *,
    delay_days: Annotated[float | None, Parameter(help="the delay group to bring back to events")] = None,
    predicate: Annotated[bool, Parameter(negative="", help="the predicate stream")] = False,
    ack_lost_log: Annotated[bool, Parameter(negative="", help="admit that events are lost")] = False,
    reason: Reason = "",
    where: Where = Where(),
) -> None:
    """Bring demoted actions back to events, by a walk of their buckets. Siblings replay the same window, harmlessly."""

    async def work(site: Any) -> list[str]:
        snapshot = await site.worker.compile()
        buckets: list[str]
        if ack_lost_log:
            buckets = await site.operator.acknowledge_lost_log(snapshot, reason=reason)
        else:
            delay_ns = None if delay_days is None else round(delay_days * site.settings.calendar.day_ns)
            buckets = await site.operator.reseed(snapshot, delay_ns=delay_ns, predicate=predicate)
        return buckets

    subject = {"predicate": "yes"} if predicate else {"delay_days": f"{delay_days:g}"} if delay_days is not None else {}
    what = "acknowledge-lost-log" if ack_lost_log else "reseed"
    say(f"will be walked and seeded: {', '.join(acted(where, what, subject, work, reason))}")
