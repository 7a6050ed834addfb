"""`lakebed lifecycle`: status, dry runs, the ledger, blockers, and operator actions."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, in_loop
from lakebed.core.errors import NotFound
from lakebed.lifecycle.commands.rules import rules
from lakebed.lifecycle.commands.shared import (
    Bucket,
    DryRunFlag,
    OneBucket,
    Reason,
    acted,
    bytes_of,
    rules_in_force,
    with_services,
)
from lakebed.lifecycle.commands.ttl import ttl
from lakebed.spark.progress import spark_progress

blockers = App(name="blockers", help="Streams that wait for an operator.")
Ident = Annotated[str, Parameter(help="the blocker's id, from `lakebed lifecycle blockers list`")]
All = Annotated[bool, Parameter(name="--all", negative="", help="every blocker")]
Cause = Annotated[str, Parameter(help="only blockers whose reason contains this text, like TRANSPORT_ERROR")]
StreamName = Annotated[str, Parameter(help="only this kind of stream: original, predicate, pending or bootstrap")]


@blockers.command(name="list")
def blockers_list(
    *, stream: StreamName = "", bucket: OneBucket = "", where: Where = Where(), output: Output = "table"
) -> None:
    """List the blocked streams, and why."""
    emit(
        with_services(where, lambda services: services.operator.blockers(stream=stream.upper(), bucket=bucket)), output
    )


blockers.command(blockers_list, name="ls", show=False)


@blockers.command(name="retry")
def blockers_retry(
    ident: Ident = "", *, every: All = False, bucket: OneBucket = "", cause: Cause = "", where: Where = Where()
) -> int:
    """Retry now: one blocker, or all that are meant. What succeeds continues; otherwise the exit code is 1."""

    async def work(services: Any) -> list[tuple[str, Any]]:
        snapshot = await services.enforcer.compile()
        found = await services.operator.chosen(ident, every=every, bucket=bucket, cause=cause)
        return [
            (one.key, await services.operator.retry(one.blocker_id, services.enforcer.resolver, snapshot))
            for one in found
        ]

    answers = acted(where, "retry", _meant(ident, every, bucket, cause), work)
    for key, answer in answers:
        say(f"{key}: {answer.value}")
    return 0 if all(answer.resolved for _, answer in answers) else 1


@blockers.command(name="resume")
def blockers_resume(
    ident: Ident = "", *, every: All = False, bucket: OneBucket = "", cause: Cause = "", where: Where = Where()
) -> None:
    """Remove blockers; the worker retries automatically."""

    async def work(services: Any) -> list[Any]:
        found = await services.operator.chosen(ident, every=every, bucket=bucket, cause=cause)
        return [await services.operator.resume(one.blocker_id) for one in found]

    for lifted in acted(where, "resume", _meant(ident, every, bucket, cause), work):
        say(f"{lifted.key}: retrying automatically")


@blockers.command(name="quarantine")
def blockers_quarantine(
    ident: Ident = "",
    *,
    reason: Reason,
    every: All = False,
    bucket: OneBucket = "",
    cause: Cause = "",
    where: Where = Where(),
) -> None:
    """Skip what the blockers name and let their streams continue. Recorded with the reason."""
    import getpass

    who = getpass.getuser()

    async def work(services: Any) -> list[Any]:
        found = await services.operator.chosen(ident, every=every, bucket=bucket, cause=cause)
        return [await services.operator.quarantine(one.blocker_id, reason=reason, who=who) for one in found]

    for lifted in acted(where, "quarantine", _meant(ident, every, bucket, cause), work, reason):
        say(f"{lifted.key}: skipped")


@blockers.command(name="isolated")
def blockers_isolated(*, bucket: OneBucket = "", where: Where = Where(), output: Output = "table") -> None:
    """List the keys and events that could not be processed, and why. Their streams continued; scans try them again."""
    emit(with_services(where, lambda services: services.operator.isolated(bucket=bucket)), output)


def _meant(ident: str, every: bool, bucket: str, cause: str) -> dict[str, str]:
    wanted = {"blocker": ident, "all": "yes" if every else "", "bucket": bucket, "cause": cause}
    return {name: value for name, value in wanted.items() if value}


app = App(name="lifecycle", help="S3 expiration rules, run on events.")
app.command(rules)
app.command(blockers)
app.command(ttl)

Key = Annotated[str, Parameter(help="the object's key")]
Action = Annotated[str, Parameter(help="the action, or a prefix of its name, from `lakebed lifecycle status`")]
Days = Annotated[float, Parameter(help="days between two scans")]
Limit = Annotated[int, Parameter(help="most rows to show")]
Resume = Annotated[bool, Parameter(help="resume them", negative="")]


# Looking.


@app.command
def status(
    bucket: OneBucket = "",
    *,
    limit: Annotated[int, Parameter(help="most actions to show")] = 500,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show mode, health and progress of every action, or of one bucket's."""
    from lakebed.lifecycle.view import status_rows

    found = with_services(
        where, lambda services: status_rows(services.operator, services.state.runtime, bucket, limit=max(1, limit))
    )
    emit(found, output)
    if not found:
        say("no rule runs yet: a worker reads a new policy within lifecycle.poll_s (lakebed lifecycle rules list)")
    if len(found) >= limit:
        say(f"the first {limit} actions: give a bucket or raise --limit to see others")


@app.command(name="dry-run")
def dry_run_command(
    bucket: Bucket,
    *,
    policy: Annotated[
        Path | None, Parameter(name=["--rules", "--policy"], help="evaluate this policy instead of the one in force")
    ] = None,
    days_ahead: Annotated[float, Parameter(help="evaluate as if this many days had passed")] = 0.0,
    engine: Annotated[
        Literal["walk", "spark"],
        Parameter(help="walk: scan the bucket in this process; spark: list and evaluate it with Spark"),
    ] = "walk",
    inventory: Annotated[
        str, Parameter(help="evaluate an S3 Inventory report instead of a listing: its manifest.json, s3://… or a file")
    ] = "",
    keep: Annotated[
        bool,
        Parameter(negative="", help="keep the candidates that Spark finds as a table, for `lakebed lifecycle apply`"),
    ] = False,
    where: Where = Where(),
    output: Output = "table",
) -> int:
    """Show what a policy would delete now: how many, how many bytes, by which rule, with a sample. Deletes nothing.

    Exits 1, with the reason, when `lifecycle rules put` would refuse the policy for this bucket.
    """
    from lakebed.lifecycle.view import preview

    text = bytes_of(policy) if policy else None
    if engine == "walk" and not inventory and not keep:
        emit(with_services(where, lambda services: preview(services, bucket, text, days_ahead=days_ahead)), output)
    else:
        from lakebed.lifecycle.policy import rules_of
        from lakebed.lifecycle.spark_job import scan

        rules = (
            with_services(where, lambda services: rules_in_force(services, bucket))
            if text is None
            else rules_of(text, unique_ids=True)
        )
        with spark_progress("scan"):
            found = scan(where.context("cli"), bucket, rules, days_ahead=days_ahead, inventory=inventory, keep=keep)
        emit(found, output)
    return exits.FAILED if text is not None and _is_refused(where, bucket, text) else exits.OK


def _is_refused(where: Where, bucket: str, text: bytes) -> bool:
    """Whether a put of this policy would be refused; says why."""
    from lakebed.lifecycle.policy import as_xml
    from lakebed.lifecycle.reserved import ReachesReserved
    from lakebed.lifecycle.workers import reserved_of

    try:
        as_xml(text, bucket=bucket, reserved=reserved_of(where.context("cli")))
    except ReachesReserved as error:
        say(f"put would be refused: {error.message}")
        say(f"next:  {error.hint}; or try it on a bucket of its own: lakebed bucket create NAME")
        return True
    return False


@app.command(name="apply")
def apply_candidates(bucket: Bucket, *, reason: Reason, dry_run: DryRunFlag = False, where: Where = Where()) -> None:
    """Re-check each candidate of the last kept scan, and delete those that are still due."""
    from lakebed.lifecycle.spark_job import apply, candidate_count

    if dry_run:
        count = with_services(where, lambda services: candidate_count(services, bucket))
        say(f"{bucket}: {count} candidates would be checked")
        return
    done = acted(where, "apply", {"bucket": bucket}, lambda services: apply(services, bucket), reason)
    say(f"{bucket}: {done.keys} keys, {done.deleted} deleted, {done.passed} passed, {done.held} held ({reason})")


@app.command
def summary(*, where: Where = Where(), output: Output = "table") -> None:
    """Show lag, exceptions, blockers and counts of all actions in one line."""
    from lakebed.lifecycle.view import summary as lane

    emit(in_loop(lambda: lane(where.context("cli"))), output)


@app.command
def streams(*, where: Where = Where(), output: Output = "table") -> None:
    """Show the position and the lag of each cursor of the event stream."""
    from lakebed.lifecycle.view import streams as stream_rows

    emit(in_loop(lambda: stream_rows(where.context("cli"))), output)


@app.command
def ledger(bucket: Bucket, *, limit: Limit = 100, where: Where = Where(), output: Output = "table") -> None:
    """Show the last decisions on a bucket's objects."""
    from lakebed.lifecycle.view import ledger as last

    context = where.context("cli")
    emit(in_loop(lambda: last(context, bucket, limit=max(1, limit))), output)


@app.command
def why(bucket: Bucket, key: Key, *, where: Where = Where(), output: Output = "table") -> None:
    """Show every decision of lifecycle about one key."""
    found = _rows(where, bucket, key)
    if not found and with_services(where, lambda services: _is_reserved(services, bucket, key)):
        raise NotFound(
            f"{bucket}/{key} belongs to Lakebed itself: no rule deletes it",
            hint="lifecycle.shared names the folders of this bucket that hold other data",
        )
    if not found:
        raise NotFound(
            f"lifecycle has no decision about {bucket}/{key}",
            hint=f"lakebed lifecycle when {bucket} {shlex.quote(key)} shows when it is due",
        )
    emit(found, output)


@app.command
def when(
    bucket: Bucket,
    key: Key,
    *,
    upload_id: Annotated[str, Parameter(help="an incomplete upload of the key")] = "",
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show when a key is due by the rules in force, and what will be done to it."""
    from lakebed.lifecycle.view import when as forecast

    found = with_services(where, lambda services: forecast(services, bucket, key, upload_id))
    emit(found.actions if output in ("table", "jsonl") else found, output)
    say(f"x-amz-expiration: {found.expiration}" if found.expiration else f"{bucket}/{key}: no rule expires it")


async def _is_reserved(services: Any, bucket: Bucket, key: str) -> bool:
    held: bool = services.reserved.holds(bucket, key)
    return held


def _rows(where: Where, bucket: Bucket, key: str) -> list[dict[str, Any]]:
    from lakebed.lifecycle.ledger import DeletionLedger
    from lakebed.lifecycle.view import ledger_row

    async def work(services: Any) -> list[dict[str, Any]]:
        book = DeletionLedger(services.state.runtime)
        return [ledger_row(row) for row in await book.of_key(bucket, key)]

    return with_services(where, work)


# Acting.


@app.command
def run(*, where: Where = Where(), output: Output = "table") -> None:
    """Run one round now: scan buckets, sweep events, drain exceptions."""

    async def work(services: Any) -> Any:
        return await services.enforcer.run_round()

    emit(acted(where, "run", {}, work), output)


@app.command
def pause(bucket: Bucket, action: Action = "", *, resume: Resume = False, where: Where = Where()) -> None:
    """Pause a bucket's actions, all or by name prefix; --resume resumes them with a new bucket scan."""
    names = acted(
        where,
        "go-on" if resume else "pause",
        {"bucket": bucket, "action": action},
        lambda services: services.operator.pause(bucket, action, paused=not resume),
    )
    say(f"{bucket}: {len(names)} actions {'resumed' if resume else 'paused'}")


@app.command
def rebootstrap(bucket: Bucket, action: Action = "", *, where: Where = Where()) -> None:
    """Start a bootstrap scan of a bucket now, for all its actions or those with a name prefix."""

    async def work(services: Any) -> None:
        await services.operator.rebootstrap(bucket, action)
        await services.operator.wake("cli")

    acted(where, "walk", {"bucket": bucket, "action": action}, work)
    say(f"{bucket}: bucket scan requested")


@app.command
def cadence(bucket: Bucket, action: Action, days: Days, *, where: Where = Where()) -> None:
    """Set how often an action's safety scan runs, in days; 0 restores the default of its kind."""

    async def work(services: Any) -> list[str]:
        every_ns = round(days * services.settings.calendar.day_ns)
        names: list[str] = await services.operator.cadence(bucket, action, every_ns)
        return names

    subject = {"bucket": bucket, "action": action, "days": f"{days:g}"}
    say(f"{bucket}: {len(acted(where, 'cadence', subject, work))} actions")


@app.command
def reseed(
    *,
    delay_days: Annotated[float | None, Parameter(help="the delay group to return to events")] = None,
    predicate: Annotated[bool, Parameter(negative="", help="the predicate stream")] = False,
    where: Where = Where(),
) -> None:
    """Return demoted actions to events, by a scan of their buckets. Siblings replay the same events, which is safe."""

    async def work(services: Any) -> list[str]:
        snapshot = await services.enforcer.compile()
        delay_ns = None if delay_days is None else round(delay_days * services.settings.calendar.day_ns)
        buckets: list[str] = await services.operator.reseed(snapshot, delay_ns=delay_ns, predicate=predicate)
        return buckets

    subject = {"predicate": "yes"} if predicate else {"delay_days": f"{delay_days:g}"} if delay_days is not None else {}
    say(f"buckets to scan: {', '.join(acted(where, 'reseed', subject, work))}")
