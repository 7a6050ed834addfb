"""Lineage against a real receiver: the events are what the specification requires, and no receiver fails a job."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Secret, load
from lakebed.spark import lineage
from lakebed.spark.lineage import Dataset, EventSender, lineage_of
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import sections
from support.lineage_receiver import check, receiving

AT_THE_END = """
from lakebed.core.clock import SystemClock
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from lakebed.spark.lineage import lineage_of
from lakebed.core.settings import load

with lineage_of(make_context(load(sections(), flags={"store.url": "s3://lake"}), role="test")).job("short"):
    pass
"""


def context_of(**flags: Any) -> Context:
    settings = load(sections(), flags={"store.url": "s3://lake", "store.prefix": "a", **flags})
    clock = SystemClock()
    return Context(
        node="node", settings=settings, store=MemoryStore(clock=clock), clock=clock, ids=Ids(), metrics=Metrics()
    )


def output_text(context: Context) -> EventSender:
    sender = lineage_of(context)._sender
    assert sender is not None
    assert sender.flush(timeout_s=100.0)
    return sender


def test_a_job_is_told_from_start_to_end() -> None:
    """START and COMPLETE of one run, with the datasets as they became known; a failure is FAIL, and continues."""
    with receiving() as receiver:
        context = context_of(**{"spark.lineage": {"url": receiver.url, "api_key": "k3y", "namespace": "site"}})
        with lineage_of(context).job("rollup", inputs=[Dataset("tables/bronze/x", 3)]) as run:
            run.wrote("tables/silver/x", version=7, rows=12)
        with pytest.raises(ZeroDivisionError), lineage_of(context).job("broken"):
            raise ZeroDivisionError("by zero")
        output_text(context)

    for event in receiver.events:
        check(event)
    start, complete, _, fail = receiver.events
    assert [("START", "rollup"), ("COMPLETE", "rollup"), ("START", "broken"), ("FAIL", "broken")] == receiver.told()
    assert start["run"]["runId"] == complete["run"]["runId"] != fail["run"]["runId"]
    assert ("s3://lake", "a/tables/bronze/x") == (start["inputs"][0]["namespace"], start["inputs"][0]["name"])
    (output,) = complete["outputs"]
    assert ("7", 12) == (
        output["facets"]["version"]["datasetVersion"],
        output["outputFacets"]["outputStatistics"]["rowCount"],
    )
    assert "ZeroDivisionError: by zero" == fail["run"]["facets"]["errorMessage"]["message"]
    assert {("/api/v1/lineage", "Bearer k3y")} == set(receiver.requests)


def test_a_job_that_polls_is_told_only_when_it_did_something() -> None:
    """An idle round reports nothing; one that wrote, and one that failed, report both their events, in order."""
    with receiving() as receiver:
        context = context_of(**{"spark.lineage": {"url": receiver.url, "namespace": "polls"}})
        with lineage_of(context).job("idle", polls=True):
            pass
        with lineage_of(context).job("busy", polls=True) as run:
            run.wrote("tables/x", version=1)
        with pytest.raises(OSError), lineage_of(context).job("broken", polls=True):
            raise OSError("gone")
        output_text(context)

    reported = [("START", "busy"), ("COMPLETE", "busy"), ("START", "broken"), ("FAIL", "broken")]
    assert reported == receiver.told()


def test_a_receiver_that_refuses_or_is_gone_fails_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """500, nobody there, a full queue: the job continues, and the events are counted."""
    with receiving() as receiver:
        receiver.status = 500
        refused = context_of(**{"spark.lineage": {"url": receiver.url}})
        with lineage_of(refused).job("one"):
            pass
        output_text(refused)
    gone = context_of(**{"spark.lineage": {"url": receiver.url, "endpoint": "gone"}})
    with lineage_of(gone).job("two"):
        pass
    output_text(gone)
    monkeypatch.setattr(lineage, "EVENTS_MAX", 1)
    full = Metrics()
    sender = EventSender("http://127.0.0.1:9/", Secret(""), full)
    for _ in range(100):
        sender.send(b"{}")

    outcomes = [each.metrics.value("lakebed_lineage_events_total", outcome="failed") for each in (refused, gone)]
    assert [2.0, 2.0] == outcomes
    assert 0 < full.value("lakebed_lineage_events_total", outcome="dropped")


@pytest.mark.full
def test_the_standard_environment_counts_and_the_last_event_leaves_a_short_process() -> None:
    """OPENLINEAGE_URL is enough, and a command that ends at once has reported its COMPLETE; disabled means silence."""
    with receiving() as receiver:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("LAKEBED_", "OPENLINEAGE_"))}
        env = {**clean, "PYTHONPATH": os.pathsep.join(sys.path), "OPENLINEAGE_URL": receiver.url}
        env["OPENLINEAGE_NAMESPACE"] = "from-env"
        subprocess.run([sys.executable, "-c", AT_THE_END], env=env, check=True, timeout=200)
        quiet = {**env, "OPENLINEAGE_DISABLED": "true"}
        subprocess.run([sys.executable, "-c", AT_THE_END], env=quiet, check=True, timeout=200)

    assert [("START", "short"), ("COMPLETE", "short")] == receiver.told()
    assert {"from-env"} == {event["job"]["namespace"] for event in receiver.events}


def test_without_an_address_nothing_is_said() -> None:
    """No sender, no thread."""
    assert lineage_of(context_of(), env={})._sender is None
