"""`lakebed doctor` for lifecycle: whether SeaweedFS's own lifecycle worker runs on the same cluster."""

from __future__ import annotations

from collections.abc import Sequence

from lakebed.core.context import Context, Diagnosis
from lakebed.core.errors import LakebedError
from lakebed.filer.settings import FilerSettings
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.workers import open_services

RECENT_S = 2 * 86_400  # it runs daily


async def checks(context: Context) -> Sequence[Diagnosis]:
    """One line where a filer is configured."""
    if not context.settings.of(FilerSettings).configured:
        return []
    try:
        async with open_services(context) as services:
            ran_ns = await services.lake.own_worker_ns()
    except LakebedError as error:
        return [Diagnosis("lifecycle", "fail", error.message, error.hint)]
    return [judged(ran_ns, context.clock.now_ns()), allowed(context.settings.of(LifecycleSettings).buckets)]


def allowed(buckets: Sequence[str]) -> Diagnosis:
    """Which buckets lifecycle may delete from."""
    if buckets:
        return Diagnosis("lifecycle buckets", "pass", f"deletes only from {', '.join(buckets)}")
    return Diagnosis("lifecycle buckets", "pass", "deletes from every bucket with a policy (lifecycle.buckets)")


def judged(ran_ns: int, now_ns: int) -> Diagnosis:
    """Two workers are safe: both delete only what is due. But SeaweedFS's keeps no ledger and follows other rules."""
    if now_ns - ran_ns > RECENT_S * 1_000_000_000:
        return Diagnosis("lifecycle", "pass", "no other lifecycle worker runs on this cluster")
    hours = max(0, now_ns - ran_ns) / 3.6e12
    return Diagnosis(
        "lifecycle",
        "warn",
        f"SeaweedFS's own lifecycle worker ran {hours:.1f} h ago on this cluster; its deletions are not in the ledger",
        "run weed's workers without the job type s3_lifecycle: see docs/parts/lifecycle.md",
    )
