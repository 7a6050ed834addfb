"""Where the filer answers: one key for everything that follows or changes it."""

from __future__ import annotations

from typing import Annotated, ClassVar

from lakebed.settings import Contradiction, Section, describe


class FilerSettings(Section, frozen=True):
    section: ClassVar[str] = "filer"

    grpc: Annotated[str, describe("gRPC addresses of SeaweedFS filers, host:port, comma between; empty: none")] = ""
    timeout_s: Annotated[float, describe("longest wait for one answer of a filer")] = 10.0
    unhealthy_s: Annotated[float, describe("how long a filer that failed is asked last")] = 60.0

    def check(self) -> None:
        if self.timeout_s <= 0:
            raise Contradiction("filer.timeout_s", "filer.timeout_s", "it must be more than 0")

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(one.strip() for one in self.grpc.split(",") if one.strip())
