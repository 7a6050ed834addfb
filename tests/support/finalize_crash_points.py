"""`lakebed` with real Spark that kills itself with -9 inside a finalize, at the moment named by DIES_AT."""

from __future__ import annotations

import os
import signal
from typing import Any

from lakebed.pipeline.bronze.ticks import BronzeWriter
from lakebed.pipeline.tables.table import Table

# Parquet is in the bucket and no log entry names it; one table of two is committed.
STEPS: dict[str, tuple[type, str, bool]] = {
    "before_the_log_entry": (Table, "commit", True),
    "between_two_tables": (BronzeWriter, "_write", False),
}


def deadly(kind: object, name: str, *, before: bool) -> None:
    alive = getattr(kind, name)

    def dying(*args: Any, **named: Any) -> Any:
        if not before:
            alive(*args, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(kind, name, dying)


if __name__ == "__main__":
    if step := os.environ.get("DIES_AT", ""):
        kind, name, before = STEPS[step]
        deadly(kind, name, before=before)
    from lakebed.__main__ import main

    main()
