"""`lakebed pipeline rollup`: aggregates accepted batches in windows of time."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, as_operator, in_loop
from lakebed.spark.progress import spark_progress


def rollup(
    *,
    cold: Annotated[
        bool, Parameter(help="check every accepted batch, not only new and late ones", negative="")
    ] = False,
    engine: Annotated[
        Literal["spark", "local"] | None, Parameter(help="Spark, or this process (default: rollups.engine)")
    ] = None,
    where: Where = Where(),
    output: Output = "json",
) -> int:
    """Roll up what was accepted: chunks, their index and a manifest, each sample counted once.

    Exits 1 when batches could not be read: they are listed by key and tried again by the next run; the rest is
    rolled up.
    """
    from lakebed.rollups.settings import RollupSettings
    from lakebed.rollups.workers import ROLLUP, roller

    context = where.context("rollup", {"rollups.engine": engine} if engine else None)

    async def work() -> Any:
        async with (
            as_operator(context, "pipeline.rollup", {"of": "all" if cold else "late"}),
            context.run_log("rollups").record(ROLLUP, "batches") as run,
        ):
            report = await roller(context).run(cold=cold)
            report.report_to(run)
            return report

    on_spark = context.settings.of(RollupSettings).engine == "spark"
    with spark_progress("rollup") if on_spark else nullcontext():
        report = in_loop(work)
    emit(msgspec.to_builtins(report), output)
    for each in report.unreadable:
        say(f"skipped: {each.key} ({each.problem})")
    return exits.FAILED if report.unreadable else exits.OK
