"""`lakebed pipeline rollup`: what accepted batches come to in windows of time."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from lakebed.cli import exits
from lakebed.cli.jobs import spark_progress
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, by_hand, in_loop


def rollup(
    *,
    cold: Annotated[
        bool, Parameter(help="look at every batch there ever was, not only late ones", negative="")
    ] = False,
    engine: Annotated[
        Literal["spark", "local"] | None, Parameter(help="Spark, or this process (default: rollup.engine)")
    ] = None,
    where: Where = Where(),
    output: Output = "json",
) -> int:
    """Roll up what was accepted: chunks, their index and a manifest, each sample counted once.

    Exits 1 when batches could not be read: they are set aside, named by key, tried again by the next run, and the rest
    is rolled up.
    """
    from lakebed.batches.settings import RollupSettings
    from lakebed.gateway.rollups import roller

    context = where.context("rollup", {"rollup.engine": engine} if engine else None)

    async def work() -> Any:
        async with by_hand(context, "pipeline.rollup", {"of": "all" if cold else "late"}):
            return await roller(context).run(cold=cold)

    on_spark = context.settings.of(RollupSettings).engine == "spark"
    with spark_progress("rollup") if on_spark else nullcontext():
        report = in_loop(work)
    emit(msgspec.to_builtins(report), output)
    for each in report.unreadable:
        say(f"set aside: {each.key} ({each.problem})")
    return exits.FAILED if report.unreadable else exits.OK
