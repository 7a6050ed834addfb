"""What every lane shares. One embedded bucket serves a whole session; each test gets a fresh prefix of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import hypothesis
import msgspec
import pytest
import structlog

from lakebed.core.clock import ManualClock, SystemClock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import system_runtime
from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.embedded.weed import Weed
from lakebed.store.connect import connect
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.runtimes import runtime_of

# Ctrl-C is part of what is tested. A lane that a script starts in the background has it ignored, and so would have all
# that the lane starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every time that is shown or read is UTC, on a machine of any zone: here none of the hours and days are the same.
os.environ["TZ"] = "Pacific/Auckland"
time.tzset()

# A lane gives one answer for one tree: the same examples each time. `make explore` looks at new ones.
hypothesis.settings.register_profile("lane", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", print_blob=True, deadline=None)
hypothesis.settings.load_profile("explore" if os.environ.get("LAKEBED_TEST_EXPLORE") else "lane")

# A traceback in a log is plain here. structlog's own default draws every frame with its locals, for 0.3 s.
plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])


@pytest.fixture(autouse=True)
def logs_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test configures of the logs ends with it, and no logger remembers it."""
    before, configure = structlog.get_config(), structlog.configure
    monkeypatch.setattr(
        structlog, "configure", lambda **said: configure(**{**said, "cache_logger_on_first_use": False})
    )
    yield
    configure(**before)


@pytest.fixture
def clock() -> SystemClock:
    return SystemClock()


@pytest.fixture
def manual_clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def ids() -> Ids:
    return Ids()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture(scope="session")
def weed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    """A real SeaweedFS server for the whole session (one per xdist worker), started when first requested."""
    server = Weed(tmp_path_factory.mktemp("weed"), runtime=system_runtime())
    asyncio.run(server.start())
    try:
        yield server
    finally:
        asyncio.run(server.stop(grace_s=0.0))


@pytest.fixture(scope="session")
def weed(weed_server: Weed) -> BucketEndpoints:
    """Where that server answers."""
    return weed_server.endpoints


@pytest.fixture
def bucket_settings(weed: BucketEndpoints) -> StoreSettings:
    """How to reach a prefix of the real bucket that nothing has ever been written under.

    Patiently: a machine that is stalled for a while has not lost its bucket.
    """
    settings = weed.store_settings(prefix=f"test-{Ids().token()}")
    return msgspec.structs.replace(settings, timeout_s=120.0, retry_timeout_s=300.0)


@pytest.fixture
def bucket(bucket_settings: StoreSettings, clock: SystemClock, ids: Ids, metrics: Metrics) -> Store:
    """The store on that prefix."""
    return connect(bucket_settings, runtime_of(clock, ids, metrics))
