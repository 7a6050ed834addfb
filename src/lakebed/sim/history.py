"""What callers were told, to be compared with what is stored: every acknowledged change once, no refused one ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

ASKED, ACKNOWLEDGED, REFUSED = "asked", "acknowledged", "refused"


class History:
    """The fate of every change, by its id. One that was only asked may be applied once or not at all."""

    def __init__(self) -> None:
        self._fates: dict[str, str] = {}

    def asked(self, change: str) -> str:
        self._fates[change] = ASKED
        return change

    def acknowledged(self, change: str) -> None:
        self._fates[change] = ACKNOWLEDGED

    def refused(self, change: str) -> None:
        """Its caller was told that nothing was done."""
        self._fates[change] = REFUSED

    def those(self, fate: str) -> list[str]:
        return [change for change, each in self._fates.items() if each == fate]

    def count(self, fate: str) -> int:
        return len(self.those(fate))

    def judge(self, applied: Iterable[str]) -> str | None:
        """What is wrong with these applied changes, in a sentence; None when nothing is."""
        times = Counter(applied)
        for change, count in times.items():
            fate = self._fates.get(change)
            if fate is None:
                return f"{change} is applied, and nobody asked for it"
            if fate == REFUSED:
                return f"{change} is applied, and its caller was told it was not"
            if count > 1:
                return f"{change} is applied {count} times"
        for change, fate in self._fates.items():
            if fate == ACKNOWLEDGED and change not in times:
                return f"{change} was acknowledged and is not applied"
        return None
