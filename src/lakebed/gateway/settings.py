"""How the gateway listens, whom it lets in and how long it waits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from lakebed.settings import Contradiction, Secret, Section, describe

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class KeySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One API key or agent token: whose it is, the secret, and the rights it carries."""

    name: str
    secret: Secret
    rights: tuple[str, ...] = ()


class GatewaySettings(Section, frozen=True):
    section: ClassVar[str] = "gateway"

    host: Annotated[str, describe("address to listen on; other than loopback needs keys")] = "127.0.0.1"
    port: Annotated[int, describe("port to listen on; 0 chooses a free one")] = 0
    keys: Annotated[tuple[KeySettings, ...], describe("API keys and agent tokens")] = ()
    keys_file: Annotated[Path | None, describe("TOML file with more [[keys]]")] = None
    read_only: Annotated[bool, describe("register no route that writes")] = False
    body_bytes_max: Annotated[int, describe("largest request body, checked before it is read")] = 64 * 1024 * 1024
    bodies_bytes_max: Annotated[int, describe("bytes of all bodies under way; more are answered 503")] = (
        256 * 1024 * 1024
    )
    body_timeout_s: Annotated[
        float, describe("over each such time a body brings at least 1 KiB a second, or is given up")
    ] = 20.0
    body_total_s: Annotated[float, describe("longest time for a whole body")] = 600.0
    head_timeout_s: Annotated[float, describe("longest wait for the head of a request on an open connection")] = 20.0
    connections_max: Annotated[int, describe("open connections; more are answered 503")] = 4096
    health_timeout_s: Annotated[float, describe("longest wait for one component's health")] = 2.0
    drain_s: Annotated[float, describe("time to finish what is under way at a stop")] = 20.0
    work_port: Annotated[int, describe("port for the workers' health and metrics; 0 chooses a free one")] = 0
    prove: Annotated[
        Literal["auto", "never"],
        describe("auto: race the store at start unless a proof is stored in the bucket; never: only check the path"),
    ] = "auto"

    def check(self) -> None:
        if self.body_bytes_max > self.bodies_bytes_max:
            raise Contradiction(
                "gateway.body_bytes_max", "gateway.bodies_bytes_max", "the largest body could never be taken"
            )
        if self.host not in LOOPBACK and not self.keys and self.keys_file is None:
            raise Contradiction(
                "gateway.host", "gateway.keys", f"listening on {self.host} without any key would let anybody in"
            )
