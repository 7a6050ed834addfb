"""A roller on the real bucket, killed with -9 behind every request it makes: nothing counts twice, nothing is lost."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from lakebed.core.clock import ManualClock, SystemClock
from lakebed.core.settings import env_name
from lakebed.store.connect import PrefixedStore
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.roller_crash_points import HOUR_NS, samples
from support.rollup_fixtures import ask, by_hand, make_roller, shown

pytestmark = pytest.mark.full

CRASH_POINTS = 60  # more than a run makes requests: the last ones end by themselves
DEADLINE_S = 500.0
TESTS = Path(__file__).parent.parent


@pytest.mark.timeout(900)
async def test_a_roller_killed_behind_every_request_counts_every_sample_once(
    bucket: Store, bucket_settings: StoreSettings
) -> None:
    """After each kill a query agrees with the samples at once, and again when the next roller has gone on."""
    layer = {env_name(key): str(value) for key, value in bucket_settings.as_layer().items()}
    crashing = await asyncio.create_subprocess_exec(
        sys.executable,
        str(TESTS / "support/roller_crash_points.py"),
        str(CRASH_POINTS),
        env={**os.environ, **layer, "PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}"},
        stdout=PIPE,
    )
    output, _ = await asyncio.wait_for(crashing.communicate(), DEADLINE_S)
    output_text = output.decode().splitlines()
    reported = [(f"a{agent}", sample) for agent in range(2) for sample in samples(agent)]
    end_ns = HOUR_NS + 3600 * 10**9

    for point in range(1, CRASH_POINTS + 1):
        store = PrefixedStore(bucket, f"point-{point}")
        before = await ask(store, SystemClock(), "cpu", 60, HOUR_NS, end_ns)
        assert by_hand(reported, "cpu", 60) == shown(before), f"right after {output_text[point - 1]}"
        later = ManualClock(SystemClock().now_ns() + 120 * 10**9)  # when the dead owner's lease is over
        report = await make_roller(store, later).run()
        after = await ask(store, later, "cpu", 60, HOUR_NS, end_ns)
        assert by_hand(reported, "cpu", 60) == shown(after), f"{output_text[point - 1]}, then {report}"
        assert (0, 0, 1) == (report.abandoned, after.sources["raw"], after.sources["rollup"]), output_text[point - 1]

    killed = [line for line in output_text if line.endswith("killed")]
    assert len(killed) > 15
    assert output_text[-1].endswith("ended")  # every request there is was tried
