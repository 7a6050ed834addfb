"""A folder that is uploaded as ticks."""

from __future__ import annotations

from pathlib import Path

import httpx2

from lakebed.core.ids import Ids
from lakebed.core.runtime import Runtime
from lakebed.ticks.folder_uploader import FolderUploader
from lakebed.ticks.outbox import Outbox
from lakebed.ticks.packing import READY_FILE
from lakebed.ticks.uploader import Uploader
from support.tick_fixtures import ORG, PROJECT, Service, parquet
from support.tick_uploads import NoWait, Wire


class Site:
    """One folder beside a service: drop a tick, run a round, look."""

    def __init__(self, service: Service, root: Path) -> None:
        self.service, self.root = service, root
        self.folder, self.outbox = root / "drop", Outbox(root / "outbox")
        self.wires = [Wire(service.app), Wire(service.app)]
        self.alerts: dict[str, str] = {}
        self.clock = NoWait()

    def courier(self, *, keep: bool = False) -> FolderUploader:
        headers = {"x-api-key": ORG, "x-api-secret": self.service.secrets[ORG, PROJECT]}
        runtime = Runtime(clock=self.clock, ids=Ids.seeded(1), metrics=self.service.context.metrics)
        uploaders = [
            Uploader(
                httpx2.AsyncClient(transport=wire, base_url="http://127.0.0.1", headers=headers),
                runtime, tries_max=3,
            )
            for wire in self.wires
        ]  # fmt: skip
        return FolderUploader(
            self.folder, self.outbox, uploaders, runtime, project_id=PROJECT, keys={"": ["id"]}, keep=keep,
            alert=self._alert,
        )  # fmt: skip

    def drop(self, name: str, ids: list[int], *, ready: bool = True) -> Path:
        folder = self.folder / name
        folder.mkdir(parents=True)
        (folder / "orders.parquet").write_bytes(parquet(ids))
        if ready:
            (folder / READY_FILE).touch()
        return folder

    def _alert(self, kind: str, message: str | None) -> None:
        if message is None:
            self.alerts.pop(kind, None)
        else:
            self.alerts[kind] = message
