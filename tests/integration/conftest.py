"""Fixtures of the integration lane."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakebed.core.runtime import system_runtime
from lakebed.meta.oxia.backend import OxiaMeta
from lakebed.store.settings import StoreSettings
from support import oxia_server
from support.gateway_process import start
from support.log_processes import METAS, settings_of

__all__ = ["start"]


@pytest.fixture(params=METAS)
async def log_settings(
    request: pytest.FixtureRequest, bucket_settings: StoreSettings, tmp_path: Path
) -> dict[str, str]:
    """Of the processes of one log on the real bucket, on each backend of meta that processes share."""
    if request.param == "oxia":
        meta = OxiaMeta(system_runtime(), oxia_server.ADDRESS)
        await oxia_server.empty(meta)
        await meta.close()
    return settings_of(bucket_settings, tmp_path, request.param)
