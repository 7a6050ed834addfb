"""Progress of running Spark jobs, read from Spark's status tracker, or on Connect from the server's reports.

    with watching(show):
        …   # jobs, in this thread or others

`show` is called from another thread a few times a second. It may be called before there is progress to show.
`spark_progress` shows it as a bar on the terminal. Importing this module does not load Spark.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from lakebed.core.runs import ActiveRun

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_S = 0.25


class JobProgress(msgspec.Struct, frozen=True):
    """Tasks of all stages so far. `spark` is the state of the session."""

    spark: str
    stages: int = 0
    tasks: int = 0
    done: int = 0
    running: int = 0
    failed: int = 0


class StageCounter:
    """Adds up stages over time, because Spark soon forgets finished ones. Pure."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int, int]] = {}  # tasks, done, failed

    def look(self, active: dict[str, tuple[int, int, int]], running: int) -> JobProgress:
        """`active` are the running stages; a known stage that is no longer active has finished."""
        for name, (tasks, _, failed) in self._known.items():
            if name not in active:
                self._known[name] = (tasks, tasks, failed)
        self._known |= active
        tasks, done, failed = (sum(column) for column in zip((0, 0, 0), *self._known.values(), strict=True))
        return JobProgress("ready", len(self._known), tasks, done, running, failed)


@contextmanager
def watching(show: Callable[[JobProgress], None], *, poll_s: float = POLL_S) -> Iterator[None]:
    """Shows progress until the block is left."""
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(show, over, poll_s), name="spark-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join(poll_s * 8)


def _watch(show: Callable[[JobProgress], None], over: threading.Event, poll_s: float) -> None:
    from pyspark.sql.utils import is_remote

    from lakebed.spark import session

    stages = StageCounter()
    while (spark := session.current()) is None:
        show(JobProgress(session.state()))
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


def _listen(spark: Any, counter: StageCounter, show: Callable[[JobProgress], None], over: threading.Event) -> None:
    """Connect has no tracker in the client; its server reports the stages of each operation as it goes."""

    def on_progress(stages: Any = None, inflight_tasks: int = 0, operation_id: str | None = None, **_: Any) -> None:
        active = {
            f"{operation_id}/{each.stage_id}": (each.num_tasks, each.num_completed_tasks, 0) for each in stages or ()
        }
        show(counter.look(active, inflight_tasks))

    spark.registerProgressHandler(on_progress)
    try:
        over.wait()
    finally:
        spark.removeProgressHandler(on_progress)


@contextmanager
def reporting(run: ActiveRun) -> Iterator[None]:
    """Shows the progress of the block's jobs as that of a recorded run."""

    def show(now: JobProgress) -> None:
        run.progress("running tasks" if now.tasks else "starting Spark", now.tasks, now.done)

    run.progress("starting Spark")
    with watching(show):
        yield


@contextmanager
def spark_progress(what: str) -> Iterator[None]:
    """A progress bar on stderr while the block's jobs run; nothing when stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)

        def show(now: JobProgress) -> None:
            if now.spark != "ready":
                progress.update(task, description=f"{what}: Spark is {now.spark}")
                return
            text = f"{what}: {now.stages} stages, {now.running} tasks running"
            text += f", {now.failed} failed" if now.failed else ""
            progress.update(task, description=text, completed=now.done, total=now.tasks or None)

        with watching(show):
            yield
