"""Settings of the gateway: address, keys, limits and timeouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from lakebed.core.auth import UNLIMITED, KeyLimits
from lakebed.core.settings import Contradiction, Secret, Section, describe

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class KeySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One API key or agent token: its name, its rights, and one of secret, SHA-256 of the secret and certificate."""

    name: str
    secret: Secret = Secret("")
    rights: tuple[str, ...] = ()
    sha256: str = ""
    certificate: str = ""
    tenant: str = ""
    expires: str = ""
    limits: KeyLimits = UNLIMITED


class GatewaySettings(Section, frozen=True):
    section: ClassVar[str] = "gateway"

    host: Annotated[
        str,
        describe(
            "Address to listen on; any address other than loopback requires keys.",
            when="other machines must reach the gateway",
        ),
    ] = "127.0.0.1"
    port: Annotated[int, describe("Port to listen on; 0 chooses a free one.", when="clients need a fixed address")] = 0
    keys: Annotated[
        tuple[KeySettings, ...],
        describe("Lists API keys and agent tokens with their rights.", when="clients must authenticate"),
    ] = ()
    keys_file: Annotated[
        Path | None, describe("TOML file with more [[keys]].", when="keys must stay out of lakebed.toml")
    ] = None
    tls_cert: Annotated[
        Path | None,
        describe(
            "PEM file of the gateway's certificate with its chain; loaded again when it changes.",
            when="other machines reach the gateway and no proxy in front of it has TLS",
        ),
    ] = None
    tls_key: Annotated[
        Path | None, describe("PEM file of the key of gateway.tls_cert.", when="gateway.tls_cert is set")
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        describe("PEM file of the authorities whose client certificates are accepted instead of a key."),
    ] = None
    tls_ca: Annotated[
        Path | None,
        describe("PEM file of the authorities that agents and other clients verify gateways with, not the system's."),
    ] = None
    tls_elsewhere: Annotated[
        bool, describe("Silences the warning about a gateway for others without TLS: a proxy in front of it has TLS.")
    ] = False
    read_only: Annotated[
        bool, describe("Serves no route that writes.", when="this gateway is only for queries and the console")
    ] = False
    body_bytes_max: Annotated[
        int,
        describe(
            "Limits the size of one request body, checked before it is read.", when="clients get 413 for valid requests"
        ),
    ] = 64 * 1024 * 1024
    bodies_bytes_max: Annotated[
        int, describe("Limits the bytes of all request bodies in memory; further requests get 503.")
    ] = 256 * 1024 * 1024
    body_timeout_s: Annotated[
        float, describe("Rejects a body that brings less than 1 KiB per second over this time.")
    ] = 20.0
    body_total_s: Annotated[float, describe("Limits the time to receive a whole body.")] = 600.0
    head_timeout_s: Annotated[float, describe("Limits the wait for the head of a request on an open connection.")] = (
        20.0
    )
    connections_max: Annotated[int, describe("Limits open connections; further ones get 503.")] = 4096
    health_timeout_s: Annotated[float, describe("Limits the wait for the health check of one component.")] = 2.0
    drain_s: Annotated[
        float,
        describe(
            "Limits how long running requests may finish when the gateway stops.",
            when="requests take longer than this, or the process manager kills sooner",
        ),
    ] = 60.0
    fast_path: Annotated[
        bool,
        describe(
            "Serves small requests to hot routes without ASGI; false uses ASGI for all, with the same answers.",
        ),
    ] = True
    work_port: Annotated[
        int,
        describe(
            "Port of the workers' health and metrics; 0 chooses a free one.", when="Prometheus scrapes `lakebed work`"
        ),
    ] = 0
    prove: Annotated[
        Literal["auto", "never"],
        describe(
            "auto tests conditional writes of the store at start, unless a test result is stored in the "
            "bucket; never checks only the path."
        ),
    ] = "auto"

    def check(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise Contradiction("gateway.tls_cert", "gateway.tls_key", "one needs the other")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise Contradiction("gateway.tls_client_ca", "gateway.tls_cert", "client certificates need TLS")
        if self.body_bytes_max > self.bodies_bytes_max:
            raise Contradiction(
                "gateway.body_bytes_max", "gateway.bodies_bytes_max", "one body must fit into the total of all bodies"
            )
