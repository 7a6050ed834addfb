"""Deletes on SeaweedFS's TTL volumes: the entry goes in its conditional step, the bytes go with their volume."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import msgspec
import pytest
import pytest_asyncio

from lakebed.core.clock import SystemClock
from lakebed.core.errors import Invalid, NotFound, Stale
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.embedded.weed import Weed, WeedIdentity
from lakebed.filer.client import FilerClient
from lakebed.filer.model import Attributes, Clause, ConditionKind, FilerEntry, Mutation, MutationKind, Transaction
from lakebed.lifecycle.model import Rule, Verb
from lakebed.lifecycle.seams import Removal
from lakebed.lifecycle.seaweed.deletes import CONF_FOLDER, CONF_NAME
from lakebed.lifecycle.seaweed.store import SeaweedLake
from lakebed.lifecycle.seaweed.ttl import BucketTtl, TtlRoute
from lakebed.store.admin import client

DEADLINE_S = 100.0


class Place:
    """A bucket whose `timed/` is routed to volumes that live for a day."""

    def __init__(self, server: Weed) -> None:
        weed = server.endpoints
        self.clock, self.name = SystemClock(), f"ttl-{Ids().token()}"
        file = server.child.log.with_name("identity.json")
        self.identity = msgspec.json.decode(file.read_bytes(), type=WeedIdentity)
        self.s3 = client(weed.store_settings())
        self.s3.create_bucket(Bucket=self.name)
        self.filer = FilerClient([weed.filer_grpc], Runtime(clock=self.clock, ids=Ids(), metrics=Metrics()))
        self.lake = SeaweedLake(self.filer, Runtime(clock=self.clock, ids=Ids(), metrics=Metrics()))

    async def route(self, *locations: dict[str, str]) -> None:
        """Written as the store's own shell writes it; the filer takes it up by itself."""
        conf = msgspec.json.encode({"version": 1, "locations": locations})
        now_ns = self.clock.now_ns()
        entry = FilerEntry(CONF_NAME, attributes=Attributes(len(conf), now_ns, now_ns, 0o644), content=conf)
        put = Mutation(MutationKind.PUT, CONF_FOLDER, CONF_NAME, entry)
        try:
            held = await self.filer.lookup(CONF_FOLDER, CONF_NAME)
            clause = Clause(ConditionKind.ENTRY_EQUAL, expected=held.raw)
        except NotFound:
            clause = Clause(ConditionKind.NOT_EXISTS)
        await self.filer.transact(Transaction(f"{CONF_FOLDER}/{CONF_NAME}", (clause,), (put,)))

    async def put(self, key: str, *, timed: bool) -> FilerEntry:
        """Puts the object until it has a time, or has none: a new route takes effect a moment later."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                await asyncio.to_thread(self.s3.put_object, Bucket=self.name, Key=key, Body=b"x" * 5000)
                folder, _, name = f"/buckets/{self.name}/{key}".rpartition("/")
                entry = await self.filer.lookup(folder, name)
                if (entry.attributes.ttl_s > 0) == timed:
                    return entry
                await asyncio.sleep(0.2)

    async def has_bytes(self, entry: FilerEntry) -> bool:
        """Whether the volume still gives the first piece."""
        claims = {"fid": entry.head_fid, "exp": self.clock.now_ns() // 1_000_000_000 + 600}
        head = {"authorization": f"Bearer {_token(self.identity.volume_read_key, claims)}"}
        async with httpx2.AsyncClient(timeout=DEADLINE_S) as ask:
            answer = await ask.get(f"http://127.0.0.1:{self.identity.ports['volume']}/{entry.head_fid}", headers=head)
        assert answer.status_code in (200, 404)
        return answer.status_code == 200


def _token(key: str, claims: dict[str, Any]) -> str:
    """A JSON web token, signed by HMAC-SHA256 with the key that the volume server knows."""
    fields = [{"alg": "HS256", "typ": "JWT"}, claims]
    signed = b".".join(base64.urlsafe_b64encode(msgspec.json.encode(field)).rstrip(b"=") for field in fields)
    seal = hmac.new(key.encode(), signed, hashlib.sha256).digest()
    return b".".join([signed, base64.urlsafe_b64encode(seal).rstrip(b"=")]).decode()


@pytest_asyncio.fixture
async def place(weed_server: Weed) -> AsyncIterator[Place]:
    made = await asyncio.to_thread(Place, weed_server)
    await made.route({"locationPrefix": f"/buckets/{made.name}/timed/", "ttl": "1d"})
    yield made
    await made.route()
    await made.lake.close()


async def test_bytes_on_a_ttl_volume_are_left_to_it_and_others_are_deleted(place: Place) -> None:
    """Both entries are gone; of the bytes, those on the TTL volume are still there long after the others are not."""
    timed, plain = await place.put("timed/k", timed=True), await place.put("plain", timed=False)
    judged = {key: (await place.lake.look(place.name, key)).entries[0] for key in ("timed/k", "plain")}
    assert await place.has_bytes(timed) and await place.has_bytes(plain)

    assert Removal.METADATA_ONLY is await place.lake.delete(judged["timed/k"], Verb.CURRENT)
    assert Removal.WHOLE is await place.lake.delete(judged["plain"], Verb.CURRENT)

    async with asyncio.timeout(DEADLINE_S):
        while await place.has_bytes(plain):
            await asyncio.sleep(0.2)
    assert await place.has_bytes(timed)
    assert "Contents" not in await asyncio.to_thread(place.s3.list_objects_v2, Bucket=place.name)


async def test_an_object_on_a_ttl_volume_that_was_overwritten_stays(place: Place) -> None:
    """The guard is the same: what was judged is not there any more."""
    await place.put("timed/k", timed=True)
    (judged,) = (await place.lake.look(place.name, "timed/k")).entries
    await place.put("timed/k", timed=True)

    with pytest.raises(Stale):
        await place.lake.delete(judged, Verb.CURRENT)
    assert (await place.lake.look(place.name, "timed/k")).entries


async def test_a_route_is_set_for_a_bucket_and_earlier_objects_are_stamped(place: Place) -> None:
    """New objects go to TTL volumes, earlier ones get the TTL once; their bytes are removed with them, not left."""
    rules = (Rule("r", prefix="logs/", expiration_days=3),)
    before = await place.put("logs/before", timed=False)
    await place.put("other", timed=False)
    ttl = BucketTtl(place.filer, place.name)
    with pytest.raises(Invalid):
        await ttl.set(2, rules, "logs/")
    with pytest.raises(Invalid):
        await ttl.set(3, rules)

    await ttl.set(3, rules, "logs/")

    await place.put("logs/after", timed=True)
    assert [TtlRoute("logs/", "3d"), TtlRoute("timed/", "1d")] == await ttl.routes()
    first, second = await ttl.back_stamp(), await ttl.back_stamp()
    assert ((2, 1), (2, 0)) == ((first.files, first.stamped), (second.files, second.stamped))
    stamped = await place.filer.lookup(f"/buckets/{place.name}/logs", "before")
    assert (3 * 86_400, before.chunks) == (stamped.attributes.ttl_s, stamped.chunks)
    got = await asyncio.to_thread(place.s3.get_object, Bucket=place.name, Key="logs/before")
    assert b"x" * 5000 == got["Body"].read()
    (judged,) = (await place.lake.look(place.name, "logs/before")).entries
    assert Removal.WHOLE is await place.lake.delete(judged, Verb.CURRENT)

    await ttl.clear("logs/")
    assert [TtlRoute("timed/", "1d")] == await ttl.routes()
    await place.put("logs/later", timed=False)
