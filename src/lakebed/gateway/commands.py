"""`lakebed keys`: the keys in the bucket, which every gateway reads within seconds. A secret is printed once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, as_operator, in_loop
from lakebed.core.auth import KeyLimits
from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import Invalid
from lakebed.gateway.keys import (
    SECRET_PREFIX,
    KeyList,
    KeyRecord,
    added,
    at_ms,
    digest,
    key_list,
    rotated,
    session_list,
    without,
)

app = App(name="keys", help="API keys in the bucket: add, list, revoke, rotate.")

Name = Annotated[str, Parameter(help="name of the key")]
DryRun = Annotated[bool, Parameter(help="only show what would happen", negative="")]
Reason = Annotated[str, Parameter(help="why; kept in the audit trail")]
NEVER = "-"


@app.command
def add(
    name: Name,
    /,
    *,
    rights: Annotated[tuple[str, ...], Parameter(help="a right or a pattern of rights (may be repeated)")] = (),
    tenant: Annotated[str, Parameter(help="tenant that the key belongs to; it sees only the tenant's things")] = "",
    certificate: Annotated[
        str, Parameter(help="name in a client certificate that is accepted instead of a secret")
    ] = "",
    expires: Annotated[str, Parameter(help="last day or instant (2027-01-31), or days from now (90d)")] = "",
    requests_per_s: Annotated[float, Parameter(help="requests a second on each gateway (0: unlimited)")] = 0.0,
    bytes_per_s: Annotated[float, Parameter(help="bytes of request bodies a second (0: unlimited)")] = 0.0,
    records_per_s: Annotated[float, Parameter(help="records and samples a second (0: unlimited)")] = 0.0,
    topics_max: Annotated[int, Parameter(help="topics it may create (0: unlimited)")] = 0,
    series_max: Annotated[int, Parameter(help="series in one batch (0: unlimited)")] = 0,
    uploads_max: Annotated[int, Parameter(help="requests with a body at the same time (0: unlimited)")] = 0,
    dry_run: DryRun = False,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Add a key and print its secret, which is not stored and cannot be shown again."""
    context = where.context("cli")
    secret = "" if certificate else SECRET_PREFIX + context.ids.secret()
    key = KeyRecord(
        name=name,
        sha256=digest(secret.encode()).hex() if secret else "",
        rights=rights,
        tenant=tenant,
        certificate=certificate,
        expires_ms=_expiry(expires, context),
        limits=KeyLimits(requests_per_s, bytes_per_s, records_per_s, topics_max, series_max, uploads_max),
        created_ms=now_ms(context.clock),
    )

    def decide(known: KeyList) -> tuple[KeyList, None]:
        return added(known, key), None

    if not rights:
        raise Invalid(f"key {name!r} would have no rights", hint="lakebed keys add NAME --rights 'log:*'")
    in_loop(lambda: _change(context, "keys.add", name, decide, dry_run=dry_run))
    if dry_run:
        say(f"would add key {name}")
        return
    emit({"name": name, "secret": secret} if secret else {"name": name, "certificate": certificate}, output)
    say("Keep the secret now: it is not stored. Gateways accept it within seconds.")


@app.command(name="list")
def show(*, where: Where = Where(), output: Output = "table") -> None:
    """Show the keys in the bucket: rights, tenant, expiry and last use, no secret."""
    context = where.context("cli")

    async def work() -> list[dict[str, Any]]:
        keys = (await key_list(context).read()).value.keys
        used = (await session_list(context).read()).value.used
        return [_row(key, used.get(key.name, 0), now_ms(context.clock)) for key in keys]

    emit(in_loop(work), output)


@app.command
def revoke(name: Name, /, *, reason: Reason, dry_run: DryRun = False, where: Where = Where()) -> None:
    """Remove a key: within seconds every gateway refuses it and ends its sessions."""
    context = where.context("cli")
    in_loop(
        lambda: _change(
            context, "keys.revoke", name, lambda known: (without(known, name), None), reason=reason, dry_run=dry_run
        )
    )
    say(f"{'would revoke' if dry_run else 'revoked'} key {name}")


@app.command
def rotate(
    name: Name, /, *, reason: Reason, dry_run: DryRun = False, where: Where = Where(), output: Output = "table"
) -> None:
    """Give a key another secret and print it; the former secret ends within seconds."""
    context = where.context("cli")
    secret = SECRET_PREFIX + context.ids.secret()
    hashed = digest(secret.encode()).hex()
    in_loop(
        lambda: _change(
            context,
            "keys.rotate",
            name,
            lambda known: (rotated(known, name, hashed), None),
            reason=reason,
            dry_run=dry_run,
        )
    )
    if dry_run:
        say(f"would rotate key {name}")
        return
    emit({"name": name, "secret": secret}, output)


async def _change(context: Context, what: str, name: str, decide: Any, *, reason: str = "", dry_run: bool) -> None:
    if what != "keys.add" and not reason.strip():
        raise Invalid(f"{what} needs a reason", hint=f"lakebed {what.replace('.', ' ')} {name} --reason 'why'")
    keys = key_list(context)
    if dry_run:
        decide((await keys.read()).value)
        return
    async with as_operator(context, what, {"key": name}, reason):
        await keys.change(decide)


def _expiry(text: str, context: Context) -> int:
    if not text:
        return 0
    if text.endswith("d") and text[:-1].isdecimal() and len(text) <= 6:
        return now_ms(context.clock) + int(timedelta(days=int(text[:-1])).total_seconds() * 1000)
    return at_ms(text)


def _row(key: KeyRecord, used_ms: int, at: int) -> dict[str, Any]:
    state = "expired" if key.expires_ms and key.expires_ms <= at else "active"
    limits = ", ".join(f"{name} {value:g}" for name, value in msgspec.to_builtins(key.limits).items() if value)
    row = {"name": key.name, "state": state, "tenant": key.tenant, "rights": " ".join(key.rights), "limits": limits}
    row |= {"certificate": key.certificate, "created": _day(key.created_ms), "expires": _day(key.expires_ms)}
    return row | {"last_use": _day(used_ms)}


def _day(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M") if ms else NEVER
