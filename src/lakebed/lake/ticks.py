"""Ticks: files uploaded as one unit and committed into tables."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lakebed.cli.output import byte_bar
from lakebed.core.errors import Invalid
from lakebed.core.runtime import Runtime
from lakebed.core.settings import Secret
from lakebed.ticks.model import DEFAULT_ORG, DEFAULT_PROJECT
from lakebed.ticks.settings import TicksSettings

if TYPE_CHECKING:
    from lakebed.ticks.model import FinalizeResult


LocalSecret = Callable[[str, str], Awaitable[str]]  # (org, project) -> the project's secret


class AsyncTicks:
    """Uploads to a gateway. `org` and `secret` come from the settings (`ticks.org_id`, `ticks.api_secret`).

    On a stack of this machine `local_secret` gives them: its organisation is "local".
    """

    def __init__(
        self,
        url: str,
        settings: TicksSettings,
        runtime: Runtime,
        local_secret: LocalSecret | None = None,
        ca_file: Path | None = None,
    ) -> None:
        self._url, self._settings, self._runtime = url, settings, runtime
        self._local_secret, self._ca_file = local_secret, ca_file

    async def push(
        self,
        *files: str | Path,
        project: str = DEFAULT_PROJECT,
        key: str | Sequence[str] = (),
        mode: str = "",
        org: str = "",
        secret: str = "",
        progress: bool = False,
    ) -> FinalizeResult:
        """Uploads Parquet, CSV, JSON or JSON Lines files as one tick; returns when it is committed to bronze.

        Each file is a table; `TABLE_seq=NNN.parquet` are pages of one. `key` names the primary key columns.
        `progress` shows a bar, in a terminal or a notebook.
        With a key rows are upserted (`mode="delta"`); without one the tables are replaced (`"full"`).
        """
        from lakebed.ticks import packing
        from lakebed.ticks.codec import read_manifest
        from lakebed.ticks.uploader import Uploader, client

        if not self._url:
            raise Invalid("ticks are uploaded to a gateway, and none is known", hint="connect(url=…), or lakebed up")
        org, api_secret = org or self._settings.org_id, Secret(secret) or self._settings.api_secret
        if self._local_secret is not None:
            org = org or DEFAULT_ORG
            api_secret = api_secret or Secret(await self._local_secret(org, project))
        if not org or not api_secret:
            raise Invalid(
                "ticks need an org and a secret",
                hint="ticks.org_id and ticks.api_secret; lakebed ticks secret --project P creates one",
            )
        now = datetime.fromtimestamp(self._runtime.clock.now_ns() / 1e9, UTC)
        keys = [key] if isinstance(key, str) else list(key)
        with tempfile.TemporaryDirectory(prefix="lakebed-tick-") as folder:
            packed = packing.pack(
                packing.find([packing.as_parquet(Path(file), Path(folder)) for file in files]),
                project_id=project,
                tick_id=f"{now:%Y%m%dT%H%M%S}__{self._runtime.ids.token()[:8]}",
                dt=f"{now:%Y%m%d}",
                keys={"": keys},
                mode=mode,
            )
            total_bytes = sum(part.size for part in read_manifest(packed.manifest.encode()).parts)
            with byte_bar(total_bytes, always=True) if progress else nullcontext(_ignored) as sent:
                async with client(self._url, org, api_secret, self._ca_file) as http:
                    return await Uploader(http, self._runtime, sent=sent).upload(packed)


def _ignored(size_bytes: int) -> None:
    """Takes the place of a progress bar."""
