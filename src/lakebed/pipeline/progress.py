"""How far Spark's running jobs are, from Spark itself: its status tracker, or on Connect the server's own reports.

    with watching(show):
        …   # jobs, in this thread or others

`show` is called from another thread a few times a second with what is known. It may be called with nothing to show.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from lakebed.pipeline import session

POLL_S = 0.25


class Seen(msgspec.Struct, frozen=True):
    """Tasks of all stages seen so far. `spark` is how far the session itself is."""

    spark: str
    stages: int = 0
    tasks: int = 0
    done: int = 0
    running: int = 0
    failed: int = 0


class Stages:
    """Adds up what is seen of stages, of which Spark soon forgets those that are over. Pure."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int, int]] = {}  # tasks, done, failed

    def look(self, active: dict[str, tuple[int, int, int]], running: int) -> Seen:
        """`active` are the stages that run now; one that was seen and is gone has ended."""
        for name, (tasks, _, failed) in self._known.items():
            if name not in active:
                self._known[name] = (tasks, tasks, failed)
        self._known |= active
        tasks, done, failed = (sum(column) for column in zip((0, 0, 0), *self._known.values(), strict=True))
        return Seen("ready", len(self._known), tasks, done, running, failed)


@contextmanager
def watching(show: Callable[[Seen], None], *, poll_s: float = POLL_S) -> Iterator[None]:
    """Shows progress until the block is left."""
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(show, over, poll_s), name="spark-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join(poll_s * 8)


def _watch(show: Callable[[Seen], None], over: threading.Event, poll_s: float) -> None:
    stages = Stages()
    while (spark := session.current()) is None:
        show(Seen(session.state()))
        if over.wait(poll_s):
            return
    if is_remote():
        _listen(spark, stages, show, over)
        return
    while True:
        try:
            show(stages.look(*_tracked(spark)))
        except Exception:  # the session was closed under us: nothing is left to show
            return
        if over.wait(poll_s):
            return


def _tracked(spark: SparkSession) -> tuple[dict[str, tuple[int, int, int]], int]:
    tracker = spark.sparkContext.statusTracker()
    found = [(number, tracker.getStageInfo(number)) for number in tracker.getActiveStageIds()]
    active = {
        str(number): (info.numTasks, info.numCompletedTasks, info.numFailedTasks)
        for number, info in found
        if info is not None
    }
    return active, sum(info.numActiveTasks for _, info in found if info is not None)


def _listen(spark: Any, stages: Stages, show: Callable[[Seen], None], over: threading.Event) -> None:
    """Connect has no tracker in the client; its server reports the stages of each operation as it goes."""

    def told(stages: Any = None, inflight_tasks: int = 0, operation_id: str | None = None, **_: Any) -> None:
        active = {
            f"{operation_id}/{each.stage_id}": (each.num_tasks, each.num_completed_tasks, 0) for each in stages or ()
        }
        show(seen.look(active, inflight_tasks))

    seen = stages
    spark.registerProgressHandler(told)
    try:
        over.wait()
    finally:
        spark.removeProgressHandler(told)
