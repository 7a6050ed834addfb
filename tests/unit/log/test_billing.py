"""The billing estimate."""

from __future__ import annotations

import pytest

from lakebed.log.cost import StorageUsage, request_dollars, storage_dollars_month
from support.log_host import Host


def test_requests_cost_what_s3_standard_asks() -> None:
    """Puts and lists 0.005 dollars a thousand, gets 0.0004."""
    assert request_dollars({"put": 600, "list": 400}) == pytest.approx(0.005)
    assert request_dollars({"get": 500, "range_get": 500}) == pytest.approx(0.0004)
    assert request_dollars({}) == 0
    assert storage_dollars_month(StorageUsage(1024**3 * 100, 1)) == pytest.approx(2.3)


async def test_a_scan_shows_what_is_stored_and_counts_itself(host: Host) -> None:
    """Bytes and objects under the log's prefix; the list request is part of the bill."""
    broker = host.broker()
    await host.append(broker, b"x" * 100)
    await host.store.create("elsewhere/x", b"y")

    usage = await broker.store.measure()

    (key,) = await host.objects()
    assert usage == StorageUsage((await host.store.head(key)).size, 1)
    assert broker.store._counts == {"put": 1, "list": 1, "get": 0, "range_get": 0}
