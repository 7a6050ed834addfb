"""Which store the log coordinates through."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from lakebed.settings import Contradiction, Section, describe


class MetaSettings(Section, frozen=True):
    section: ClassVar[str] = "meta"

    backend: Annotated[
        Literal["sqlite", "bucket", "oxia", "memory"],
        describe("sqlite: one host; bucket: object storage alone; oxia: an Oxia cluster; memory: one process"),
    ] = "sqlite"
    path: Annotated[Path, describe("sqlite: the file, shared by all processes of this host")] = Path(
        ".lakebed/meta.sqlite"
    )
    sync: Annotated[
        Literal["full", "normal"], describe("sqlite: full survives power loss, normal a crash of the process")
    ] = "full"
    busy_timeout_s: Annotated[float, describe("sqlite: longest wait for another process's transaction")] = 5.0
    prefix: Annotated[str, describe("bucket: folder of the entries")] = "llog-meta"
    address: Annotated[str, describe("oxia: host:port of a server")] = "127.0.0.1:6648"
    namespace: Annotated[str, describe("oxia: namespace of the keys")] = "default"
    sorting: Annotated[
        Literal["hierarchical", "natural"], describe("oxia: how the server sorts keys (its --key-sorting)")
    ] = "hierarchical"
    timeout_s: Annotated[float, describe("oxia: one request, whole")] = 10.0

    def check(self) -> None:
        if self.busy_timeout_s <= 0 or self.timeout_s <= 0:
            raise Contradiction("meta.busy_timeout_s", "meta.timeout_s", "waits must be longer than nothing")
