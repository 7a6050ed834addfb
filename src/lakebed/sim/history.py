"""What callers saw, compared with what is stored: each acknowledged change is applied once, a refused one never."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

REQUESTED, ACKNOWLEDGED, REFUSED = "requested", "acknowledged", "refused"


class History:
    """The outcome of every change, by its id. One without a response may be applied once or not at all."""

    def __init__(self) -> None:
        self._fates: dict[str, str] = {}

    def requested(self, change: str) -> str:
        self._fates[change] = REQUESTED
        return change

    def acknowledged(self, change: str) -> None:
        self._fates[change] = ACKNOWLEDGED

    def refused(self, change: str) -> None:
        """Its caller saw an error that says nothing was done."""
        self._fates[change] = REFUSED

    def those(self, fate: str) -> list[str]:
        return [change for change, each in self._fates.items() if each == fate]

    def count(self, fate: str) -> int:
        return len(self.those(fate))

    def judge(self, applied: Iterable[str]) -> str | None:
        """What is wrong with these applied changes, in a sentence; None when all is well."""
        times = Counter(applied)
        for change, count in times.items():
            fate = self._fates.get(change)
            if fate is None:
                return f"{change} is applied, and no caller requested it"
            if fate == REFUSED:
                return f"{change} is applied, but its caller was refused"
            if count > 1:
                return f"{change} is applied {count} times"
        for change, fate in self._fates.items():
            if fate == ACKNOWLEDGED and change not in times:
                return f"{change} was acknowledged and is not applied"
        return None
