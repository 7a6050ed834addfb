"""Each test of the log gets a host of its own, on the backends of meta that its module, or the test itself, names."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from support.log_host import Host


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    named = metafunc.definition.get_closest_marker("metas")
    if named is not None and "host" in metafunc.fixturenames:
        metafunc.parametrize("host", named.args, indirect=True)


@pytest.fixture
async def host(request: pytest.FixtureRequest) -> AsyncIterator[Host]:
    host = Host(getattr(request, "param", "memory"))
    await host.emptied()
    yield host
    await host.close()
