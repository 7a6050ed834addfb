"""`lakebed trail`."""

from __future__ import annotations

from lakebed.cli.output import Output, emit
from lakebed.cli.where import Where, in_loop


def trail(*, limit: int = 50, where: Where = Where(), output: Output = "table") -> None:
    """Show what operators did by hand, newest first: who, when, what, why, and how it ended.

    Parameters
    ----------
    limit
        how many to show.
    """
    context = where.context("trail")
    emit(in_loop(lambda: context.trail.latest(limit)), output)
