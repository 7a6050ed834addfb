"""The uploader against a real service in this process: resume, re-PUT of what is named, refusals, the queue on disk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from lakebed.core.errors import Denied, Invalid, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.ticks import packing
from lakebed.ticks.model import BadManifest
from lakebed.ticks.outbox import Outbox, OutboxTick
from lakebed.ticks.packing import PackedTick
from lakebed.ticks.uploader import Uploader
from support.tick_fixtures import ORG, PROJECT, Service, context_of, parquet, serving
from support.tick_uploads import NoWait, Wire

TICK = "20261115T120000__up"


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serving(context_of()) as made:
        yield made


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "data"
    folder.mkdir()
    for seq in (1, 2, 3):
        (folder / f"orders_seq={seq:03d}.parquet").write_bytes(parquet([seq * 10, seq * 10 + 1]))
    (folder / "customers.parquet").write_bytes(parquet([7]))
    return packing.find([folder])


@pytest.fixture
def packed(files: list[Path]) -> PackedTick:
    return packing.pack(files, project_id=PROJECT, tick_id=TICK, dt="20261115", keys={"": ["id"]})


def upload_with(service: Service, wire: Wire, secret: str = "") -> Uploader:
    headers = {"x-api-key": ORG, "x-api-secret": secret or service.secrets[ORG, PROJECT]}
    http = httpx2.AsyncClient(transport=wire, base_url="http://127.0.0.1", headers=headers)
    return Uploader(http, Runtime(clock=NoWait(), ids=Ids.seeded(1), metrics=Metrics()))


async def test_files_become_a_tick(service: Service, packed: PackedTick) -> None:
    """Pages of one table are one table; every part is sent once, and the answer counts the rows."""
    wire = Wire(service.app)

    result = await upload_with(service, wire).upload(packed)

    assert (7, 0) == (result.rows_inserted, result.rows_replaced)
    assert [202] * 4 + [200] == [status for _, _, status in wire.sent]


async def test_what_was_sent_before_a_crash_is_not_sent_again(service: Service, packed: PackedTick) -> None:
    """On resume the finalize comes first, and only the parts it names follow."""
    wire = Wire(service.app)
    uploading = upload_with(service, wire)
    await uploading._put_all(packed, [0, 2], lambda seq: None)
    wire.sent.clear()

    result = await uploading.upload(packed, resume=True)

    assert 7 == result.rows_inserted
    assert [("POST", "finalize", 409), ("PUT", "1", 202), ("PUT", "3", 202), ("POST", "finalize", 200)] == wire.sent


async def test_a_part_that_is_another_at_the_service_is_deleted_and_put_again(
    service: Service, packed: PackedTick
) -> None:
    """Exactly the one that the 409 names; one that no manifest lists is taken back."""
    await service.put(1, parquet([99]), tick=TICK)
    await service.put(50, parquet([98]), tick=TICK)
    wire = Wire(service.app)

    await upload_with(service, wire).upload(packed)

    assert sorted([("DELETE", "1", 200), ("DELETE", "50", 200)]) == sorted(e for e in wire.sent if e[0] == "DELETE")
    assert ("PUT", "1", 202) in wire.sent
    assert 7 == len(await service.rows()) + 1  # one of the seven is a customer


async def test_a_part_damaged_on_the_way_is_sent_again(service: Service, packed: PackedTick) -> None:
    """The service sees another hash than the header reports; the next try is whole."""
    wire = Wire(service.app)
    damaged: list[str] = []

    def bend(request: httpx2.Request) -> httpx2.Request:
        if request.method == "PUT" and not damaged:
            damaged.append(request.url.path)
            body = request.content[:-1] + b"?"
            return httpx2.Request("PUT", request.url, headers=request.headers, content=body)
        return request

    wire.bend = bend
    result = await upload_with(service, wire).upload(packed)

    assert 7 == result.rows_inserted
    assert 1 == sum(status == 422 for _, _, status in wire.sent)


async def test_a_line_that_breaks_and_a_service_that_fails_are_tried_again(
    service: Service, packed: PackedTick
) -> None:
    """Connection errors, 5xx and a lost answer of the finalize: the tick is committed once."""
    wire = Wire(service.app)
    cuts = iter([True, False, True] + [False] * 1000)
    wire.bend = lambda request: None if next(cuts) else request
    service.queue.before["send"] = 2
    service.committed.after["create"] = 1

    result = await upload_with(service, wire).upload(packed)

    assert 7 == result.rows_inserted
    assert [503, 503, 503, 200] == [status for method, _, status in wire.sent if method == "POST"]


async def test_a_refused_tick_is_failed_manual_and_the_next_goes_on(
    service: Service, packed: PackedTick, tmp_path: Path
) -> None:
    """A 422 is for a person: it stays on disk with its reason, and holds up nobody."""
    outbox = Outbox(tmp_path / "outbox")
    lying = packed.manifest.replace('"rows":1', '"rows":2').replace('"row_count":1', '"row_count":2')
    outbox.put(
        OutboxTick(
            PackedTick("20261115T110000__bad", PROJECT, lying.replace(TICK, "20261115T110000__bad"), packed.files)
        )
    )
    outbox.put(OutboxTick(packed))

    done = await upload_with(service, Wire(service.app)).drain(outbox)

    assert [TICK] == list(done)
    (left,) = list(outbox.waiting())
    assert ("failed_manual", "row_count_mismatch") == (left.state, left.error_class)


async def test_what_is_not_committed_stays_on_disk(
    service: Service, packed: PackedTick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that is gone costs nothing but time; later the same tick is resumed."""

    outbox, wire = Outbox(tmp_path / "outbox"), Wire(service.app)
    outbox.put(OutboxTick(packed))
    wire.bend = lambda request: None

    with pytest.raises(Unavailable):
        await upload_with(service, wire).drain(outbox)
    (waiting,) = list(Outbox(tmp_path / "outbox").waiting())
    wire.bend = lambda request: request
    done = await upload_with(service, wire).drain(outbox)

    assert ("ready", 1) == (waiting.state, waiting.tries)
    assert ([TICK], []) == (list(done), list(outbox.waiting()))


async def test_a_wrong_secret_stops_at_once(service: Service, packed: PackedTick) -> None:
    """Nothing is tried again that cannot succeed."""
    wire = Wire(service.app)

    with pytest.raises(Denied):
        await upload_with(service, wire, "wrong").upload(packed)
    assert {403} == {status for _, _, status in wire.sent}


def test_what_cannot_be_a_tick_is_refused_before_anything_is_sent(files: list[Path], tmp_path: Path) -> None:
    """No keys for an upsert, a file that is no Parquet, a manifest whose file is elsewhere."""
    with pytest.raises(BadManifest):
        packing.pack(files, project_id=PROJECT, tick_id=TICK, dt="20261115", keys={})
    (tmp_path / "text.parquet").write_text("id,note")
    with pytest.raises(Invalid):
        packing.pack([tmp_path / "text.parquet"], project_id=PROJECT, tick_id=TICK, dt="20261115", keys={"": ["id"]})
    with pytest.raises(Invalid):
        packing.find([tmp_path / "nothing"])
    packed = packing.pack(files, project_id=PROJECT, tick_id=TICK, dt="20261115", keys={"": ["id"]})
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / packing.MANIFEST_FILE).write_text(packed.manifest.replace("customers.parquet", "../text.parquet"))
    with pytest.raises(Invalid):
        packing.pack_from_manifest(folder, project_id=PROJECT)


def test_a_folders_own_manifest_is_sent_word_for_word(files: list[Path], packed: PackedTick) -> None:
    """The agent wrote it; nobody rewrites it."""
    folder = files[0].parent
    (folder / packing.MANIFEST_FILE).write_text(packed.manifest)

    reported = packing.pack_from_manifest(folder, project_id=PROJECT)

    assert packed == reported
