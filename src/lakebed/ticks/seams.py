"""What ticks needs from a pipeline, and nothing more. Spark implements both; tests use the twins in `twins.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lakebed.ticks.model import BronzeResult, BronzeTick, SilverResult, SilverTick


class Bronze(Protocol):
    async def commit(self, tick: BronzeTick) -> BronzeResult:
        """Writes the tick's rows: upserted by key for `delta`, replaced for `full`. Idempotent by (org, project, tick).

        A repeat, also one after a crash half-way (some tables written, some not), changes nothing twice and gives the
        same counts and versions as the first. Never called twice at once for one org by one process, but another
        process may still be at the same tick: the table's own commit decides. Raises Unprocessable when the rows
        cannot be what the manifest says (nothing is committed then), Unavailable or Overloaded when it is worth
        trying again.
        """


class SilverJob(Protocol):
    async def run(self, org_id: str, project_id: str, ticks: Sequence[SilverTick]) -> SilverResult:
        """Brings exactly these ticks into silver, reading bronze at the versions given. Idempotent by tick.

        What a tick with `replay` made is computed again, with the same result unless the contract has changed.

        Raises any LakebedError when it failed: all its ticks are dispatched again.
        """
