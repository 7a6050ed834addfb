"""SeaweedFS's own lifecycle worker on the same cluster is noticed."""

from __future__ import annotations

import pytest

from lakebed.lifecycle.checks import judged

HOUR_NS = 3_600 * 1_000_000_000
NOW_NS = 1_760_000_000 * 1_000_000_000


@pytest.mark.parametrize(
    ("ran_ns", "verdict"), [(0, "pass"), (NOW_NS - 49 * HOUR_NS, "pass"), (NOW_NS - HOUR_NS, "warn")]
)
def test_doctor_warns_while_it_runs(ran_ns: int, verdict: str) -> None:
    """It runs daily: after two days without a run it counts as gone."""
    found = judged(ran_ns, NOW_NS)

    assert verdict == found.verdict
    assert verdict == "pass" or ("1.0 h ago" in found.seen and "s3_lifecycle" in found.fix)
