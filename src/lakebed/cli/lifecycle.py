"""`lakebed lifecycle`: rules, what they do, and what an operator decides."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from cyclopts import App, Parameter

from lakebed.cli.jobs import spark_progress
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, by_hand, in_loop
from lakebed.errors import Invalid, NotFound

app = App(name="lifecycle", help="Expiration rules that really run.")
rules = App(name="rules", help="The policies of buckets, as AWS writes them.")
blockers = App(name="blockers", help="Streams that stand still until somebody decides.")
app.command(rules)
app.command(blockers)

R = TypeVar("R")
Bucket = Annotated[str, Parameter(help="the bucket")]
OneBucket = Annotated[str, Parameter(help="only this bucket")]
Key = Annotated[str, Parameter(help="the object's key")]
File = Annotated[Path, Parameter(help="a file, or - for stdin")]
Action = Annotated[str, Parameter(help="the action, or how its name begins, as `lakebed lifecycle status` shows it")]
Ident = Annotated[str, Parameter(help="the blocker, as `lakebed lifecycle blockers ls` shows it")]
StreamName = Annotated[str, Parameter(help="only this kind of stream: original, predicate, pending or bootstrap")]
Days = Annotated[float, Parameter(help="days between two scans")]
Limit = Annotated[int, Parameter(help="rows to show at most")]
Resume = Annotated[bool, Parameter(help="let them go on", negative="")]
DryRunFlag = Annotated[bool, Parameter(name="--dry-run", negative="", help="only say what would be done")]
Reason = Annotated[str, Parameter(help="why; kept on record")]


def _with(where: Where, work: Callable[[Any], Coroutine[Any, Any, R]]) -> R:
    from lakebed import logs
    from lakebed.lifecycle.workers import opened

    logs.configure("warning")

    async def run() -> R:
        async with opened(where.context("cli")) as site:
            return await work(site)

    return in_loop(run)


def _act(
    where: Where, what: str, subject: dict[str, str], work: Callable[[Any], Coroutine[Any, Any, R]], reason: str = ""
) -> R:
    """The same, on the trail."""

    async def recorded(site: Any) -> R:
        async with by_hand(where.context("cli"), f"lifecycle.{what}", subject, reason):
            return await work(site)

    return _with(where, recorded)


def _read(file: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise Invalid(f"{file} cannot be read: {error}") from error


# Rules.


@rules.command(name="ls")
def rules_ls(*, where: Where = Where(), output: Output = "table") -> None:
    """Show every rule of every bucket."""
    from lakebed.views.lifecycle import rules as all_rules

    emit(_with(where, all_rules), output)


@rules.command(name="get")
def rules_get(bucket: Bucket, *, where: Where = Where()) -> None:
    """Print the policy of a bucket, byte for byte as it was put."""
    sys.stdout.buffer.write(_with(where, lambda site: _policy(site, bucket)))
    sys.stdout.flush()


@rules.command(name="put")
def rules_put(bucket: Bucket, file: File, *, dry_run: DryRunFlag = False, where: Where = Where()) -> None:
    """Check a policy (XML, or the AWS CLI's JSON; - is stdin) and put it. Takes the same time for any bucket."""
    from lakebed.lifecycle.policies import as_xml, rules_of

    read = _read(file)

    async def work(site: Any) -> int:
        text = as_xml(read, bucket=bucket, home=site.home)
        count = len(rules_of(text))
        if not dry_run:
            async with by_hand(where.context("cli"), "lifecycle.rules-put", {"bucket": bucket}) as told:
                await site.lake.put(bucket, text)
                told.detail = f"{count} rules"
        return count

    count = _with(where, work)
    say(f"{bucket}: {count} rules {'would be' if dry_run else ''} put".replace("  ", " "))


@rules.command(name="rm")
def rules_rm(bucket: Bucket, *, reason: Reason, dry_run: DryRunFlag = False, where: Where = Where()) -> None:
    """Remove a bucket's policy: nothing more is expired in it."""
    if not dry_run:
        _act(where, "rules-rm", {"bucket": bucket}, lambda site: site.lake.put(bucket, b""), reason)
    say(f"{bucket}: policy {'would be ' if dry_run else ''}removed ({reason})")


@rules.command(name="diff")
def rules_diff(bucket: Bucket, file: File, *, where: Where = Where()) -> int:
    """Show how a policy differs from the one in force, rule by rule. Exit code 1 when it does."""
    from lakebed.lifecycle import awsjson
    from lakebed.lifecycle.policies import rules_of

    wanted = awsjson.render(rules_of(_read(file), unique_ids=True)).decode().splitlines()
    try:
        known = awsjson.render(rules_of(_with(where, lambda site: _policy(site, bucket)))).decode().splitlines()
    except NotFound:
        known = []
    lines = list(difflib.unified_diff(known, wanted, "in force", str(file), lineterm=""))
    print("\n".join(lines)) if lines else say("no difference")
    return 1 if lines else 0


@rules.command(name="export")
def rules_export(*, where: Where = Where()) -> None:
    """Print every policy as one JSON line each: {bucket, policy}."""

    async def work(site: Any) -> list[dict[str, str]]:
        return [{"bucket": one.bucket, "policy": one.text.decode()} for one in await site.lake.all()]

    emit(_with(where, work), "jsonl")


@rules.command(name="import")
def rules_import(file: File, *, dry_run: DryRunFlag = False, where: Where = Where()) -> None:
    """Put every policy of an export. All are checked before the first is put."""
    from lakebed.lifecycle.policies import as_xml

    try:
        lines = [msgspec.json.decode(line, type=dict[str, str]) for line in _read(file).splitlines() if line.strip()]
        found = [(line["bucket"], line["policy"].encode()) for line in lines]
    except (msgspec.DecodeError, KeyError) as error:
        raise Invalid(f"{file} is not an export: {error}") from error

    async def work(site: Any) -> None:
        checked = [(bucket, as_xml(text, bucket=bucket, home=site.home)) for bucket, text in found]
        if dry_run:
            return
        async with by_hand(where.context("cli"), "lifecycle.rules-import", {"file": file.name}) as told:
            for bucket, text in checked:
                await site.lake.put(bucket, text)
            told.detail = f"{len(checked)} policies"

    _with(where, work)
    say(f"{len(found)} policies {'would be ' if dry_run else ''}put")


async def _policy(site: Any, bucket: str) -> bytes:
    from lakebed.views.lifecycle import policy

    return await policy(site, bucket)


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
    found = _with(where, lambda site: site.operator.status(bucket, limit=max(1, limit)))
    emit(found, output)
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

    text = _read(policy) if policy else None
    if engine == "walk" and not inventory and not keep:
        emit(_with(where, lambda site: preview(site, bucket, text, days_ahead=days_ahead)), output)
        return
    from lakebed.views.lifecycle_scan import scan

    known = text if text is not None else _with(where, lambda site: _policy(site, bucket))
    with spark_progress("scan"):
        told = scan(where.context("cli"), bucket, known, days_ahead=days_ahead, inventory=inventory, keep=keep)
    emit(told, output)


@app.command(name="apply")
def apply_candidates(bucket: Bucket, *, reason: Reason, dry_run: DryRunFlag = False, where: Where = Where()) -> None:
    """Delete what the last kept scan found, each looked at anew and guarded as always; what no rule wants now stays."""
    from lakebed.views.lifecycle_scan import apply, found

    if dry_run:
        say(f"{bucket}: {_with(where, lambda site: found(site, bucket))} candidates would be looked at")
        return
    done = _act(where, "apply", {"bucket": bucket}, lambda site: apply(site, bucket), reason)
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
    if not found and _with(where, lambda site: _is_home(site, bucket, key)):
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

    return _with(where, work)


# Acting.


@app.command
def run(*, where: Where = Where(), output: Output = "table") -> None:
    """Run one round of everything, now: walks, sweeps, drains."""

    async def work(site: Any) -> Any:
        return await site.worker.tick()

    emit(_act(where, "run", {}, work), output)


@app.command
def pause(bucket: Bucket, action: Action = "", *, resume: Resume = False, where: Where = Where()) -> None:
    """Pause a bucket's actions, all or those whose name begins so; --resume lets them go on, from a new walk."""
    names = _act(
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

    _act(where, "walk", {"bucket": bucket, "action": action}, work)
    say(f"{bucket}: a walk is asked for")


@app.command
def cadence(bucket: Bucket, action: Action, days: Days, *, where: Where = Where()) -> None:
    """Set how often an action's safety scan runs, in days; 0 gives the default of its kind back."""

    async def work(site: Any) -> list[str]:
        every_ns = round(days * site.settings.calendar.day_ns)
        names: list[str] = await site.operator.cadence(bucket, action, every_ns)
        return names

    subject = {"bucket": bucket, "action": action, "days": f"{days:g}"}
    say(f"{bucket}: {len(_act(where, 'cadence', subject, work))} actions")


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
    say(f"will be walked and seeded: {', '.join(_act(where, what, subject, work, reason))}")


@blockers.command(name="ls")
def blockers_ls(
    *, stream: StreamName = "", bucket: OneBucket = "", where: Where = Where(), output: Output = "table"
) -> None:
    """Show everything that stands still, and why."""
    emit(_with(where, lambda site: site.operator.blockers(stream=stream.upper(), bucket=bucket)), output)


@blockers.command(name="retry")
def blockers_retry(ident: Ident, *, where: Where = Where()) -> int:
    """Try it now. When it works the stream goes on; otherwise the blocker stays. Exit code 1 then."""

    async def work(site: Any) -> Any:
        return await site.operator.retry(ident, site.worker.resolver, await site.worker.compile())

    answer = _act(where, "retry", {"blocker": ident}, work)
    say(answer.value)
    return 0 if answer.resolved else 1


@blockers.command(name="resume")
def blockers_resume(ident: Ident, *, where: Where = Where()) -> None:
    """Take the blocker away and let the worker try again by itself."""
    lifted = _act(where, "resume", {"blocker": ident}, lambda site: site.operator.resume(ident))
    say(f"{lifted.key}: will be tried again")


@blockers.command(name="quarantine")
def blockers_quarantine(ident: Ident, *, reason: Reason, where: Where = Where()) -> None:
    """Give this one delete decision up and let the stream pass it. On record, with the reason."""
    import getpass

    who = getpass.getuser()
    lifted = _act(
        where,
        "quarantine",
        {"blocker": ident},
        lambda site: site.operator.quarantine(ident, reason=reason, who=who),
        reason,
    )
    say(f"{lifted.key}: given up")
