"""Progress of Spark jobs on the terminal, for every command that runs some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def spark_progress(what: str) -> Iterator[None]:
    """A bar on stderr while the block's jobs run, by Spark's own count of tasks; nothing where nobody looks."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    from lakebed.pipeline.progress import Seen, watching

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)

        def show(seen: Seen) -> None:
            if seen.spark != "ready":
                progress.update(task, description=f"{what}: Spark is {seen.spark}")
                return
            told = f"{what}: {seen.stages} stages, {seen.running} tasks run"
            told += f", {seen.failed} failed" if seen.failed else ""
            progress.update(task, description=told, completed=seen.done, total=seen.tasks or None)

        with watching(show):
            yield
