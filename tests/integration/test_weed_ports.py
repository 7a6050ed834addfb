"""What a stranger gets at every port of the embedded bucket: a web page, or any HTTP client without credentials."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import httpx2
import msgspec
import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime, system_runtime
from lakebed.embedded.weed import PORTS, Weed, WeedIdentity
from lakebed.filer.client import FilerClient
from lakebed.store.connect import connect
from lakebed.store.protocol import Store
from support.runtimes import runtime_of

PATIENCE = httpx2.Timeout(60.0, pool=None)
ONE_REQUEST_EACH = httpx2.Limits(max_connections=8, max_keepalive_connections=0)  # connections, a few at a time
SECRET = b"the bytes of an object " * 50
KEY = "folder/private"
LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS")


class Given(NamedTuple):
    """One answer to a request with a foreign origin and without credentials."""

    port: str
    method: str
    path: str
    status: int
    origins: str
    body: bytes


class Place:
    """A started bucket with one object in it, and what a stranger may know of it: ports, names, blob ids."""

    def __init__(self, weed: Weed) -> None:
        self.weed, self.bucket = weed, weed.endpoints.bucket
        self.client = httpx2.AsyncClient(timeout=PATIENCE, limits=ONE_REQUEST_EACH)
        self.store: Store = connect(weed.endpoints.store_settings(), runtime_of())
        file = weed.child.log.with_name("identity.json")
        self.ports = msgspec.json.decode(file.read_bytes(), type=WeedIdentity).ports

    async def paths(self) -> list[str]:
        async with FilerClient(
            [self.weed.endpoints.filer_grpc], Runtime(clock=SystemClock(), ids=Ids(), metrics=Metrics())
        ) as filer:
            entry = await filer.lookup(f"/buckets/{self.bucket}/folder", "private")
        return [
            *(f"/{chunk.fid}" for chunk in entry.chunks),
            f"/{self.bucket}/{KEY}",
            f"/buckets/{self.bucket}/{KEY}",
            f"/buckets/{self.bucket}/folder/",
            f"/buckets/{self.bucket}?recursive=true",
            f"/col/delete?collection={self.bucket}",
            f"/{self.bucket}?list-type=2",
            "/dir/assign",
            "/dir/lookup?volumeId=1",
            "/vol/grow?count=1",
            "/submit",
            "/",
        ]

    async def ask(self, name: str, port: int, method: str, path: str) -> Given | None:
        """None where HTTP is not spoken."""
        head = {"origin": "http://evil.example"}
        try:
            got = await self.client.request(method, f"http://127.0.0.1:{port}{path}", headers=head)
        except (httpx2.ReadError, httpx2.RemoteProtocolError):
            return None
        origins = got.headers.get("access-control-allow-origin", "")
        return Given(name, method, path, got.status_code, origins, got.content)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    weed = Weed(tmp_path / "bucket", runtime=system_runtime())
    await weed.start()
    made = Place(weed)
    await made.store.create(KEY, SECRET)
    async with made.client:
        yield made
    await weed.stop(0.0)


def listening(pid: int) -> set[int]:
    """Every TCP port that the process listens on, as the kernel has it."""
    links = [file.readlink() for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    sockets = {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", str(link)))}
    ports: set[int] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in sockets:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


async def test_no_port_gives_or_takes_an_object_without_credentials(place: Place) -> None:
    """The server listens where it was told and nowhere else; at none of these ports does HTTP without credentials read,
    list, write or delete anything, and what a foreign page may read is refusals only.
    """
    ports = listening(place.weed.child.pid)
    assert set(place.ports.values()) == ports and set(PORTS) == set(place.ports)

    tried = [
        place.ask(name, port, method, path)
        for name, port in place.ports.items()
        for path in await place.paths()
        for method in METHODS
    ]
    given = [answer for answer in await asyncio.gather(*tried) if answer is not None]

    assert {"s3", "volume", "filer", "master"} == {answer.port for answer in given}  # the others speak gRPC alone
    assert not [answer for answer in given if b"the bytes of" in answer.body]
    assert not [answer for answer in given if b"private" in answer.body and answer.status < 400]
    readable = [answer for answer in given if answer.origins and answer.status < 400 and answer.body]
    assert readable == []
    changes = [answer for answer in given if answer.method != "OPTIONS" and answer.status < 400]
    assert {("master", "/")} >= {(answer.port, answer.path) for answer in changes}  # a page of figures
    assert (await place.store.get(KEY)).data == SECRET


@pytest.mark.full
async def test_what_a_web_page_could_do_once_is_refused(place: Place) -> None:
    """An image tag that deletes the bucket's volumes at the master, a fetch that deletes at the filer: both find
    nobody, and the object is still there.
    """
    master, filer = place.ports["master"], place.ports["filer"]

    volumes = await place.ask("master", master, "GET", f"/col/delete?collection={place.bucket}")
    entry = await place.ask("filer", filer, "DELETE", f"/buckets/{place.bucket}/{KEY}")

    assert volumes is not None and entry is not None
    assert (volumes.status, entry.status) == (404, 404)
    assert (volumes.origins, entry.origins) == ("", "")
    assert (await place.store.get(KEY)).data == SECRET


@pytest.mark.full
async def test_a_folder_of_an_earlier_version_gets_its_keys(tmp_path: Path) -> None:
    """Its identity names no keys for the volume server: they are made, and all that was stored is still read."""
    folder = tmp_path / "bucket"
    weed = Weed(folder, runtime=system_runtime())
    await weed.start()
    await Place(weed).store.create(KEY, SECRET)
    await weed.stop(0.0)
    known = msgspec.json.decode((folder / "identity.json").read_bytes())
    for name in ("volume_write_key", "volume_read_key"):
        assert len(known.pop(name)) >= 32
    (folder / "identity.json").write_bytes(msgspec.json.encode(known))

    await weed.start()
    kept = await Place(weed).store.get(KEY)
    await weed.stop(0.0)

    assert kept.data == SECRET
