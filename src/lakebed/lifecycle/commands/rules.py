"""`lakebed lifecycle rules`: the policies of buckets."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from lakebed.cli.output import Output, emit, say, show, shown_bytes
from lakebed.cli.where import Where, as_operator
from lakebed.core.errors import Invalid, NotFound
from lakebed.lifecycle.commands.shared import Bucket, DryRunFlag, Reason, acted, bytes_of, policy_of, with_services

rules = App(name="rules", help="The lifecycle policies of buckets, in AWS formats.")
File = Annotated[Path, Parameter(help="a file, or - for stdin", allow_leading_hyphen=True)]


@rules.command(name="list")
def rules_list(*, where: Where = Where(), output: Output = "table") -> None:
    """List the rules of every bucket."""
    from lakebed.lifecycle.view import rules as all_rules

    emit(with_services(where, all_rules), output)


rules.command(rules_list, name="ls", show=False)


@rules.command(name="get")
def rules_get(bucket: Bucket, *, where: Where = Where()) -> None:
    """Print the policy of a bucket, byte for byte as it was put; on a terminal without control characters."""
    sys.stdout.buffer.write(shown_bytes(with_services(where, lambda services: policy_of(services, bucket))))
    sys.stdout.flush()


@rules.command(name="put")
def rules_put(bucket: Bucket, file: File, *, dry_run: DryRunFlag = False, where: Where = Where()) -> None:
    """Check a policy (XML, or the AWS CLI's JSON; - is stdin) and put it. Takes the same time for any bucket."""
    from lakebed.lifecycle.policy import as_xml, rules_of
    from lakebed.lifecycle.view import put_warnings

    read = bytes_of(file)

    async def work(services: Any) -> tuple[int, list[str]]:
        text = as_xml(read, bucket=bucket, reserved=services.reserved)
        checked = rules_of(text)
        warnings = await put_warnings(services, checked)
        if not dry_run:
            async with as_operator(where.context("cli"), "lifecycle.rules-put", {"bucket": bucket}) as action:
                await services.lake.put(bucket, text)
                action.detail = f"{len(checked)} rules"
        return len(checked), warnings

    count, warnings = with_services(where, work)
    for warning in warnings:
        say(f"warning: {warning}")
    say(f"{bucket}: {count} rules {'would be' if dry_run else ''} put".replace("  ", " "))


@rules.command(name="rm")
def rules_rm(bucket: Bucket, *, reason: Reason, dry_run: DryRunFlag = False, where: Where = Where()) -> None:
    """Remove a bucket's policy: nothing in it expires any more."""
    if not dry_run:
        acted(where, "rules-rm", {"bucket": bucket}, lambda services: services.lake.put(bucket, b""), reason)
    say(f"{bucket}: policy {'would be ' if dry_run else ''}removed ({reason})")


@rules.command(name="diff")
def rules_diff(bucket: Bucket, file: File, *, where: Where = Where()) -> int:
    """Show how a policy differs from the one in force, rule by rule. Exit code 1 when it does."""
    from lakebed.lifecycle.policy import render_json, rules_of
    from lakebed.lifecycle.stored_policy import StoredPolicy, stored_policy

    wanted = render_json(rules_of(bytes_of(file), unique_ids=True)).decode().splitlines()
    try:
        held = stored_policy(with_services(where, lambda services: policy_of(services, bucket)))
    except NotFound:
        held = StoredPolicy()
    known = render_json(held.rules).decode().splitlines() if held.rules else []
    lines = list(difflib.unified_diff(known, wanted, "in force", str(file), lineterm=""))
    for problem in held.problems:
        say(f"in force: {problem}")
    show("\n".join(lines)) if lines else say("no difference")
    return 1 if lines or held.problems else 0


@rules.command(name="export")
def rules_export(*, where: Where = Where()) -> None:
    """Print every policy as one JSON line each: {bucket, policy}."""

    async def work(services: Any) -> list[dict[str, str]]:
        return [{"bucket": one.bucket, "policy": one.text.decode()} for one in await services.lake.all()]

    emit(with_services(where, work), "jsonl")


@rules.command(name="import")
def rules_import(file: File, *, dry_run: DryRunFlag = False, where: Where = Where()) -> None:
    """Put every policy of an export. All are checked before the first is put."""
    from lakebed.lifecycle.paths import checked_bucket
    from lakebed.lifecycle.policy import as_xml

    try:
        lines = [msgspec.json.decode(line, type=dict[str, str]) for line in bytes_of(file).splitlines() if line.strip()]
        found = [(checked_bucket(line["bucket"]), line["policy"].encode()) for line in lines]
    except (msgspec.DecodeError, KeyError) as error:
        raise Invalid(f"{file} is not an export: {error}") from error

    async def work(services: Any) -> None:
        checked = [(bucket, as_xml(text, bucket=bucket, reserved=services.reserved)) for bucket, text in found]
        if dry_run:
            return
        async with as_operator(where.context("cli"), "lifecycle.rules-import", {"file": file.name}) as action:
            for bucket, text in checked:
                await services.lake.put(bucket, text)
            action.detail = f"{len(checked)} policies"

    with_services(where, work)
    say(f"{len(found)} policies {'would be ' if dry_run else ''}put")
