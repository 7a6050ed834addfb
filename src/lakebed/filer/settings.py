"""Settings of the SeaweedFS filer: one address list for everything that reads or changes it."""

from __future__ import annotations

from typing import Annotated, ClassVar

from lakebed.core.settings import Contradiction, Section, describe


class FilerSettings(Section, frozen=True):
    section: ClassVar[str] = "filer"

    grpc: Annotated[
        str,
        describe(
            "Lists gRPC addresses of SeaweedFS filers, host:port, separated by commas; empty means none.",
            when="the store is SeaweedFS and lifecycle rules or change events are used",
        ),
    ] = ""
    timeout_s: Annotated[float, describe("Limits the wait for one response of a filer.")] = 10.0
    unhealthy_s: Annotated[float, describe("Tries a filer that failed last for this long.")] = 60.0

    def check(self) -> None:
        if self.timeout_s <= 0:
            raise Contradiction("filer.timeout_s", "filer.timeout_s", "must be above 0")

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(one.strip() for one in self.grpc.split(",") if one.strip())
