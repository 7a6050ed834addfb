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
    masters: Annotated[
        str,
        describe(
            "Lists gRPC addresses of SeaweedFS masters, host:port, separated by commas; filers are discovered there."
        ),
    ] = ""
    tls_ca: Annotated[
        str, describe("Names the PEM file of the authority of the filers' certificates; empty means no TLS.")
    ] = ""
    tls_cert: Annotated[str, describe("Names the PEM file of the certificate shown to filers (mutual TLS).")] = ""
    tls_key: Annotated[str, describe("Names the PEM file of the key of filer.tls_cert.")] = ""
    tls_server_name: Annotated[
        str, describe("States the name in the filers' certificates; empty means the host of the address.")
    ] = ""
    timeout_s: Annotated[float, describe("Limits the wait for one response of a filer.")] = 10.0
    unhealthy_s: Annotated[float, describe("Tries a filer that failed last for this long.")] = 60.0

    def check(self) -> None:
        if self.timeout_s <= 0:
            raise Contradiction("filer.timeout_s", "filer.timeout_s", "must be above 0")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise Contradiction("filer.tls_cert", "filer.tls_key", "one needs the other")
        if self.tls_cert and not self.tls_ca:
            raise Contradiction("filer.tls_cert", "filer.tls_ca", "mutual TLS needs the authority too")

    @property
    def endpoints(self) -> tuple[str, ...]:
        return _addresses(self.grpc)

    @property
    def masters_given(self) -> tuple[str, ...]:
        return _addresses(self.masters)

    @property
    def configured(self) -> bool:
        """Whether there is a filer, named or to be discovered."""
        return bool(self.endpoints or self.masters_given)


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(one.strip() for one in text.split(",") if one.strip())
