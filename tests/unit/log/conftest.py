"""Each test of the log gets a host of its own."""

from __future__ import annotations

import pytest

from support.log_host import Host


@pytest.fixture
def host() -> Host:
    return Host()
