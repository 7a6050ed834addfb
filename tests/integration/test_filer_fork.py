"""A process that listens to the filer may start programs: Spark's Java is one."""

from __future__ import annotations

import os
import subprocess
import sys

from lakebed.embedded.endpoints import BucketEndpoints

LISTENING = """
import asyncio, signal, subprocess, sys, time

from lakebed.core.clock import SystemClock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.filer.client import FilerClient


def start():
    # As Spark starts Java: forked, with a step of Python before the program runs.
    ignore = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    return [subprocess.Popen(["true"], preexec_fn=ignore).wait() for _ in range(3)]


async def main():
    filer = FilerClient([sys.argv[1]], Runtime(clock=SystemClock(), ids=Ids(), metrics=Metrics()))
    found = asyncio.Event()

    async def listen():
        async for _ in filer.subscribe(["/"], since_ns=1):
            found.set()

    listening = asyncio.create_task(listen())
    await asyncio.wait_for(found.wait(), 150)
    print(await asyncio.to_thread(start))
    listening.cancel()


asyncio.run(main())
"""


def test_a_program_starts_beside_a_busy_channel(weed: BucketEndpoints) -> None:
    """The first one and those after it; gRPC has nothing to say about it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    ended = subprocess.run(
        [sys.executable, "-c", LISTENING, weed.filer_grpc], env=env, capture_output=True, text=True, timeout=200
    )

    assert ("[0, 0, 0]\n", "") == (ended.stdout, ended.stderr)
