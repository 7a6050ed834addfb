"""A tick from finalize to silver with SQS and DynamoDB in place of the bucket's own queue and rows."""

from __future__ import annotations

import pytest

from lakebed.core.errors import Unavailable
from lakebed.ticks.adapters import open_audit, open_queue
from lakebed.ticks.audit import COMMITTED, DISPATCHED
from lakebed.ticks.auditor import DispatchAuditor
from lakebed.ticks.dispatcher import Dispatcher
from lakebed.ticks.fakes import FakeSilverJob
from lakebed.ticks.model import TickId
from support.aws_servers import aws_server
from support.tick_fixtures import ORG, PROJECT, TICK, context_of, serving

OF = TickId(ORG, PROJECT, TICK)


@pytest.mark.parametrize("kind", ["ministack", pytest.param("moto", marks=pytest.mark.full)])
async def test_a_tick_goes_from_finalize_to_silver_once(kind: str) -> None:
    """The message is on SQS, both rows are in DynamoDB, a duplicate starts no second job, a replay does."""
    with aws_server(kind) as url:
        context = context_of(
            queue="sqs", audit="dynamodb", aws_endpoint=url, aws_access_key_id="test", aws_secret_access_key="test",
            batch_window_s=0.2, poll_s=0.1,
        )  # fmt: skip
        queue, dispatched = open_queue(context), open_audit(context, DISPATCHED)
        job = FakeSilverJob(context)
        dispatcher = Dispatcher(context, queue=queue, dispatched=dispatched, job=job)
        auditor = DispatchAuditor(context, queue=queue, committed=open_audit(context, COMMITTED), dispatched=dispatched)
        async with serving(context) as service:
            committed = await service.finalize(await service.upload())

            await auditor.resend(OF)
            while await dispatcher.round():
                pass
            once = (await job.register(ORG, PROJECT).read()).value.runs
            await auditor.replay(OF, "to see it")
            while await dispatcher.round():
                pass
            twice = (await job.register(ORG, PROJECT).read()).value.runs

        row = await open_audit(context, COMMITTED).get(OF)
        assert row is not None
        assert (200, 5, "orders=0") == (
            committed.status_code,
            row.fields["rows_inserted"],
            row.fields["bronze_db_etag"],
        )
        assert (((TICK,),), ((TICK,), (TICK,))) == (once, twice)
        assert [] == list(await auditor.undispatched())


@pytest.mark.full
async def test_a_queue_that_is_gone_is_503_and_the_tick_waits() -> None:
    """No SQS: bronze and the record are there, the agent is told to come again, and nothing is answered as done."""
    with aws_server("moto") as url:
        context = context_of(queue="sqs", aws_endpoint=url, aws_access_key_id="test", aws_secret_access_key="test")
        async with serving(context) as service:
            output = await service.upload()
            await service.queue.inner.depth()  # opened while it was there
            gone = service.queue.inner

    async with serving(context) as late:
        late.queue.inner = gone
        answer = await late.finalize(output)

    assert 503 == answer.status_code
    with pytest.raises(Unavailable):
        await gone.depth()
