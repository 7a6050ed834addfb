"""`lakebed` that kills itself with -9 at a step of ticks, named by DIES_AT: `python ticks_dying.py serve …`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from lakebed.ticks.audit.bucket import BucketAudit
from lakebed.ticks.fakes import FakeBronze, FakeSilverJob
from lakebed.ticks.finalizer import Finalizer
from lakebed.ticks.queue.bucket import BucketQueue
from lakebed.ticks.receiver import Receiver
from lakebed.ticks.uploader import Uploader

STEPS: dict[str, tuple[type, str]] = {
    "before_bronze": (FakeBronze, "commit"),
    "after_bronze": (FakeBronze, "commit"),
    "after_record": (Finalizer, "_record"),
    "after_send": (BucketQueue, "send"),
    "after_audit": (BucketAudit, "create"),
    "after_result": (Finalizer, "_commit"),
    "after_part": (Receiver, "put"),
    "before_job": (FakeSilverJob, "run"),
    "after_sending_a_part": (Uploader, "_put"),
    "after_sending_all_parts": (Uploader, "_put_all"),
    "after_delivering": (Uploader, "deliver"),
}


def deadly(kind: type, name: str, *, before: bool) -> None:
    alive = getattr(kind, name)

    async def dying(*args: Any, **named: Any) -> Any:
        if not before:
            await alive(*args, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(kind, name, dying)


if __name__ == "__main__":
    step = os.environ.get("DIES_AT", "")
    if step:
        kind, name = STEPS[step]
        deadly(kind, name, before=step.startswith("before"))
    from lakebed.cli.main import run

    sys.exit(run(sys.argv[1:]))
