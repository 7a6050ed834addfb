"""Filers found through masters, and the settings of TLS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Invalid, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.core.settings import Contradiction
from lakebed.filer.client import DISCOVER_S, FilerClient
from lakebed.filer.codec import write_entry
from lakebed.filer.model import FilerEntry
from lakebed.filer.protobuf import encode_field
from lakebed.filer.settings import FilerSettings
from lakebed.filer.transport import grpc_address
from support.scripted_filer import Scripted

FOUND = encode_field(1, write_entry(FilerEntry("k")))


def nodes(*addresses: str) -> bytes:
    return b"".join(encode_field(1, encode_field(1, address.encode())) for address in addresses)


class Discovering(Scripted):
    """Masters `m1` and `m2`; the filers are those they name."""

    def __init__(self, answer: Callable[[str, bytes], Any], given: tuple[str, ...] = ()) -> None:
        super().__init__(answer)
        runtime = Runtime(clock=ManualClock(), ids=Ids.seeded(1), metrics=Metrics())
        FilerClient.__init__(self, given, runtime, masters=["m1", "m2"])


async def test_filers_are_those_that_a_master_names() -> None:
    """A master that is down and one that leads nothing are passed over; each address becomes that of gRPC."""
    answers = {"m1": b"", "m2": nodes("a:8888.18889", "b:8888")}
    client = Discovering(lambda endpoint, _: answers.get(endpoint, FOUND))

    await client.lookup("/d", "k")

    assert ["a:18889", "b:18888"] == await client.known()
    assert ["m1", "m2", "a:18889"] == client.asked


async def test_a_new_filer_is_known_within_the_interval_and_a_gone_one_forgotten() -> None:
    """The masters are asked again every 30 s, not for each request."""
    answers = {"m1": nodes("a:1.2")}
    client = Discovering(lambda endpoint, _: answers.get(endpoint, FOUND))
    clock: Any = client._clock
    await client.lookup("/d", "k")
    answers["m1"] = nodes("b:1.2")
    await client.lookup("/d", "k")
    await clock.advance(DISCOVER_S)
    await client.lookup("/d", "k")

    assert ["m1", "a:2", "a:2", "m1", "b:2"] == client.asked


async def test_masters_that_are_down_leave_the_filers_known_before() -> None:
    """Named ones too, and are asked again after a while; with none known at all their outage is what is raised."""
    client = Discovering(
        lambda endpoint, _: grpc.StatusCode.UNAVAILABLE if endpoint[0] == "m" else FOUND, given=("named",)
    )
    clock: Any = client._clock
    for _ in range(2):
        await client.lookup("/d", "k")
    await clock.advance(DISCOVER_S)
    await client.lookup("/d", "k")
    assert ["m1", "m2", "named", "named", "m1", "m2", "named"] == client.asked

    alone = Discovering(lambda *_: grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(Unavailable, match="list of filers"):
        await alone.lookup("/d", "k")


def test_an_address_that_is_none_is_refused() -> None:
    """It names what the master said."""
    assert ("[::1]:18888", "h:7") == (grpc_address("[::1]:8888"), grpc_address("h:1.7"))
    for wrong in ("host", "h:x", "h:1.x", ""):
        with pytest.raises(Invalid):
            grpc_address(wrong)


def test_a_certificate_needs_its_key_and_the_authority() -> None:
    """Half a setting is refused before a connection is tried."""
    for wrong in ({"tls_cert": "c"}, {"tls_key": "k"}, {"tls_cert": "c", "tls_key": "k"}):
        with pytest.raises(Contradiction):
            FilerSettings(**wrong).check()
    FilerSettings(tls_ca="a", tls_cert="c", tls_key="k").check()
    assert (False, True, True) == tuple(
        one.configured for one in (FilerSettings(), FilerSettings(grpc="a:1"), FilerSettings(masters="m:1"))
    )
