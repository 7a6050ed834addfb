"""`lakebed trail`."""

from __future__ import annotations

from datetime import UTC, datetime

from lakebed.cli.output import Output, emit
from lakebed.cli.where import Where, in_loop
from lakebed.trail import Deed


def trail(*, limit: int = 50, where: Where = Where(), output: Output = "table") -> None:
    """Show what operators did by hand, newest first: who, when, what, why, and how it ended.

    Parameters
    ----------
    limit
        how many to show.
    """
    context = where.context("trail")
    found = in_loop(lambda: context.trail.latest(limit))
    emit([_shown(deed) for deed in found] if output == "table" else found, output)


def _shown(deed: Deed) -> dict[str, str]:
    """A line for people: the time as they read it, and what is said of it; -o json has all."""
    at = datetime.fromtimestamp(deed.at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    subject = ", ".join(f"{name} {value}" for name, value in deed.subject.items() if value)
    told = {"at": at, "who": deed.who, "what": deed.what, "subject": subject, "reason": deed.reason}
    return told | {"outcome": deed.outcome or "begun", "detail": deed.detail}
