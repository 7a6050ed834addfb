"""The workers of ticks alone: the sweeper, and the auditor that measures the lag. The wiring adds the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence

from lakebed.core.context import Context, Worker
from lakebed.ticks.adapters import open_audit, open_queue
from lakebed.ticks.audit import COMMITTED, DISPATCHED
from lakebed.ticks.auditor import DispatchAuditor
from lakebed.ticks.finalizer import BronzeCommitter, Finalizer
from lakebed.ticks.ownership import Ownership
from lakebed.ticks.sweeper import TickSweeper


def workers(context: Context, bronze: BronzeCommitter) -> Sequence[Worker]:
    queue = open_queue(context)
    committed, dispatched = open_audit(context, COMMITTED), open_audit(context, DISPATCHED)
    auditor = DispatchAuditor(context, queue=queue, committed=committed, dispatched=dispatched)
    ownership = Ownership(context)
    finalizer = Finalizer(context, bronze=bronze, queue=queue, committed=committed, ownership=ownership)
    sweeper = TickSweeper(context, audits=(committed, dispatched), finish=finalizer.finalize)

    async def sweep() -> None:
        ownership.start()  # renews the lease of a project whose tick is being finished
        try:
            await sweeper.run()
        finally:
            await ownership.stop()

    return [
        Worker("ticks-sweeper", sweep),
        Worker("ticks-auditor", auditor.run),
    ]
