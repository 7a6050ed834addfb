"""How long load continues in a lossy test, and what clients were answered while it did."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from support.lossy_proxy import LossyProxy

DEADLINE_S = 120.0  # load ends here whatever has happened, and the test says what is missing


class Traffic:
    """Goes on for `seconds`, then until enough answers were dropped, each other fault was met, and `enough` is true."""

    def __init__(self, proxy: LossyProxy, *, seconds: float, dropped: int, enough: Callable[[], bool]) -> None:
        self._proxy, self._seconds, self._dropped, self._enough = proxy, seconds, dropped, enough
        self._began_s = time.monotonic()
        self.answers: Counter[str] = Counter()

    @property
    def past_s(self) -> float:
        return time.monotonic() - self._began_s

    def goes_on(self) -> bool:
        if self.past_s >= DEADLINE_S:
            return False
        return self.past_s < self._seconds or not self._happened()

    def demand(self) -> None:
        """Fails a test whose load met too few faults, or achieved too little, to show anything."""
        assert self._happened(), f"too little happened: {dict(self._proxy.counts)}, answers {dict(self.answers)}"

    def _happened(self) -> bool:
        counts = self._proxy.counts
        return counts["dropped"] >= self._dropped and min(counts["cut"], counts["repeated"]) > 0 and self._enough()
