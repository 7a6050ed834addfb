"""What runs beside the gateway: the dispatcher, the sweeper, and the one that measures the lag to silver."""

from __future__ import annotations

from collections.abc import Sequence

from lakebed.context import Context, Worker
from lakebed.ticks.adapters import open_audit, open_queue
from lakebed.ticks.audit import COMMITTED, DISPATCHED
from lakebed.ticks.auditor import Auditor
from lakebed.ticks.dispatcher import Dispatcher
from lakebed.ticks.seams import SilverJob
from lakebed.ticks.sweeper import Sweeper


def workers(context: Context, job: SilverJob) -> Sequence[Worker]:
    queue = open_queue(context)
    committed, dispatched = open_audit(context, COMMITTED), open_audit(context, DISPATCHED)
    dispatcher = Dispatcher(context, queue=queue, dispatched=dispatched, job=job)
    auditor = Auditor(context, queue=queue, committed=committed, dispatched=dispatched)
    return [
        Worker("ticks-dispatcher", dispatcher.run),
        Worker("ticks-sweeper", Sweeper(context, audits=(committed, dispatched)).run),
        Worker("ticks-auditor", auditor.run),
    ]
