"""The demo as it runs: bars that move on a terminal, plain lines everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec

from lakebed.demo.numbers import Observer, rates, total
from lakebed.demo.stage import Record, Told

BLOCKS = " ▁▂▃▄▅▆▇█"
SPARK_POINTS = 30
LINE_MAX = 100
MARKS = {"line": "·", "fault": "⚡", "held": "✓", "broken": "✗"}


class Flow(msgspec.Struct, frozen=True):
    """A stream through the lake, counted by one metric."""

    name: str
    metric: str
    labels: dict[str, str] = {}


FLOWS = (
    Flow("samples accepted", "lakebed_batches_samples_total"),
    Flow("log records", "lakebed_log_records_total", {"direction": "in"}),
    Flow("queue entries", "lakebed_queue_entries_total"),
    Flow("tick rows in bronze", "lakebed_ticks_rows_total"),
    Flow("objects expired", "lakebed_lifecycle_verdicts_total", {"outcome": "DELETED"}),
    Flow("requests to the store", "lakebed_store_requests_total"),
)


def spark(values: list[float]) -> str:
    """The last values as blocks, the highest a full one."""
    last = values[-SPARK_POINTS:]
    most = max(last, default=0.0)
    return "".join(BLOCKS[round(value / most * (len(BLOCKS) - 1))] if most > 0 else " " for value in last)


def plain(told: Told) -> str:
    """One line of a pipe or a CI log; with several scenarios at a time each names its own."""
    if told.kind == "begin":
        return f"{told.scenario:<9} ▶ {told.line}"
    if told.kind == "end":
        return f"{told.scenario:<9} ■"
    return f"{told.scenario:<9} {MARKS[told.kind]} {told.line}"


class Plain:
    """Lines only."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return

    def tell(self, told: Told) -> None:
        self._say(plain(told))

    def say(self, line: str) -> None:
        self._say(line)


class Live:
    """Lines above, and below them a table whose bars move. For a terminal."""

    def __init__(self, observer: Observer, record: Record) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._observer, self._record = observer, record
        self._doing: dict[str, str] = {}
        self._console = Console(stderr=True)
        self._live = RichLive(console=self._console, get_renderable=self.picture, refresh_per_second=4, transient=True)

    def __enter__(self) -> Live:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def tell(self, told: Told) -> None:
        if told.kind == "end":
            self._doing.pop(told.scenario, None)
        else:
            self._doing[told.scenario] = told.line
        if told.kind != "end":
            self.say(plain(told))

    def say(self, line: str) -> None:
        from rich.text import Text

        self._console.print(Text(line))  # Text: markup in what is said is inert

    def picture(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("", "so far", "", "per second", ""):
            table.add_column(name, justify="right" if name else "left")
        reading = self._observer.last
        for flow in FLOWS:
            so_far = total(reading, flow.metric, **flow.labels)
            per_s = [rate for _, rate in rates(self._observer.totals(flow.metric, **flow.labels)[-SPARK_POINTS - 8 :])]
            wanted = self._record.expected.get(flow.name, 0.0)
            bar: Any = ProgressBar(total=wanted, completed=min(so_far, wanted), width=24) if wanted else Text("")
            rate = f"{per_s[-1]:,.0f}" if per_s else "0"
            table.add_row(flow.name, f"{so_far:,.0f}", bar, rate, Text(spark(per_s), style="cyan"))
        held = sum(each.held for each in self._record.proven)
        head = Text(f"\n{self._observer.now_s():5.0f} s   {held} of {len(self._record.proven)} invariants held\n")
        doing = [Text(f"{name:<9} {line}"[:LINE_MAX], style="dim") for name, line in self._doing.items()]
        return Group(head, table, Text(""), *doing)
