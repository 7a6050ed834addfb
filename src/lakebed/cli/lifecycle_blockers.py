"""`lakebed lifecycle blockers`: what stands still, and what an operator decides about it."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import App, Parameter

from lakebed.cli.lifecycle_site import OneBucket, Reason, acted, with_site
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where

blockers = App(name="blockers", help="Streams that stand still until somebody decides.")
Ident = Annotated[str, Parameter(help="the blocker, as `lakebed lifecycle blockers ls` shows it")]
StreamName = Annotated[str, Parameter(help="only this kind of stream: original, predicate, pending or bootstrap")]


@blockers.command(name="ls")
def blockers_ls(
    *, stream: StreamName = "", bucket: OneBucket = "", where: Where = Where(), output: Output = "table"
) -> None:
    """Show everything that stands still, and why."""
    emit(with_site(where, lambda site: site.operator.blockers(stream=stream.upper(), bucket=bucket)), output)


@blockers.command(name="retry")
def blockers_retry(ident: Ident, *, where: Where = Where()) -> int:
    """Try it now. When it works the stream goes on; otherwise the blocker stays. Exit code 1 then."""

    async def work(site: Any) -> Any:
        return await site.operator.retry(ident, site.worker.resolver, await site.worker.compile())

    answer = acted(where, "retry", {"blocker": ident}, work)
    say(answer.value)
    return 0 if answer.resolved else 1


@blockers.command(name="resume")
def blockers_resume(ident: Ident, *, where: Where = Where()) -> None:
    """Take the blocker away and let the worker try again by itself."""
    lifted = acted(where, "resume", {"blocker": ident}, lambda site: site.operator.resume(ident))
    say(f"{lifted.key}: will be tried again")


@blockers.command(name="quarantine")
def blockers_quarantine(ident: Ident, *, reason: Reason, where: Where = Where()) -> None:
    """Give this one delete decision up and let the stream pass it. On record, with the reason."""
    import getpass

    who = getpass.getuser()
    lifted = acted(
        where,
        "quarantine",
        {"blocker": ident},
        lambda site: site.operator.quarantine(ident, reason=reason, who=who),
        reason,
    )
    say(f"{lifted.key}: given up")
