"""How an audit judges."""

from __future__ import annotations

from typing import Annotated, ClassVar

from lakebed.settings import Contradiction, Section, describe


class AuditSettings(Section, frozen=True):
    section: ClassVar[str] = "audit"

    grace_s: Annotated[
        float, describe("what was written so shortly before a listing is not judged: it may be half done")
    ] = 60.0

    def check(self) -> None:
        if self.grace_s < 0:
            raise Contradiction("audit.grace_s", "audit.grace_s", "time does not run backwards")
