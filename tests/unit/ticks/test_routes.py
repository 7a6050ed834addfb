"""Parts and finalize over HTTP: every answer of the contract, without Spark and without a socket."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from copy import deepcopy
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog

from lakebed.core import logs
from lakebed.core.runs import RunReader
from lakebed.ticks import paths
from lakebed.ticks.adapters import open_audit
from lakebed.ticks.audit import DISPATCHED, LOG, AuditRow
from lakebed.ticks.model import TickId
from lakebed.ticks.receiver import register_of
from lakebed.ticks.runs import TicksRuns
from lakebed.ticks.view import view
from support.tick_fixtures import ORG, PROJECT, TICK, Service, context_of, manifest, parquet, serving, sha

ONE = parquet([1, 2, 3])


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serving(context_of()) as made:
        yield made


async def test_a_tick_is_uploaded_and_committed(service: Service) -> None:
    """Parts are accepted with 202, the finalize answers what it did, and the rows are in bronze."""
    manifest_ = await service.upload()

    answer = await service.finalize(manifest_)

    body = answer.json()
    assert (200, "committed", 5, 0) == (
        answer.status_code,
        body["status"],
        body["rows_inserted"],
        body["rows_replaced"],
    )
    assert {"tick_id", "status", "rows_inserted", "rows_replaced", "committed_at"} == set(body)
    assert 5 == len(await service.rows())


async def test_a_part_is_stored_once_and_the_same_again_is_already_present(service: Service) -> None:
    """202, then 200 with already_present: a repeat costs nothing and changes nothing."""
    first, again = await service.put(1, ONE), await service.put(1, ONE)

    assert (202, 200) == (first.status_code, again.status_code)
    assert (False, True) == (first.json()["already_present"], again.json()["already_present"])


async def test_another_part_under_the_same_number_is_refused(service: Service) -> None:
    """409: nothing is overwritten silently; DELETE, then PUT, takes its place."""
    other = parquet([9])
    await service.put(1, ONE)

    refused = await service.put(1, other)
    deleted, again = await service.delete(1), await service.put(1, other)

    assert (409, sha(ONE)) == (refused.status_code, refused.json()["held_sha256"])
    assert ({"file_seq": 1, "deleted": True}, 202) == (deleted.json(), again.status_code)


async def test_a_finalize_names_exactly_what_is_missing_wrong_and_unlisted(service: Service) -> None:
    """409 with the three lists; nothing is committed."""
    parts = {1: ONE, 2: parquet([4]), 3: parquet([5])}
    await service.put(1, ONE)
    await service.put(2, parquet([6]))
    await service.put(9, parquet([7]))

    answer = await service.finalize(manifest(parts, {1: 3, 2: 1, 3: 1}))

    body = answer.json()
    assert (409, [3], [2], [9]) == (answer.status_code, body["missing"], body["mismatched_sha"], body["unlisted"])
    assert {} == await service.rows()


async def test_a_repeated_finalize_gives_the_cached_answer(service: Service) -> None:
    """200 with the same body, word for word, and nothing is done twice."""
    manifest_ = await service.upload()

    first, again = await service.finalize(manifest_), await service.finalize(manifest_)

    assert (200, first.content) == (again.status_code, again.content)
    assert (1, 1) == (service.bronze.calls["commit"], service.queue.calls["send"])


async def test_while_a_finalize_runs_another_is_too_early(service: Service) -> None:
    """425 with Retry-After; the first continues."""
    manifest_ = await service.upload()
    going, may_end = asyncio.Event(), asyncio.Event()
    commit = service.bronze.inner.commit

    async def slow(tick: Any) -> Any:
        going.set()
        await may_end.wait()
        return await commit(tick)

    service.bronze.inner.commit = slow
    first = asyncio.create_task(service.finalize(manifest_))
    await going.wait()

    early, part = await service.finalize(manifest_), await service.put(7, ONE)
    may_end.set()

    assert (425, 425) == (early.status_code, part.status_code)
    assert int(early.headers["retry-after"]) >= 1
    assert 200 == (await first).status_code


async def test_after_the_commit_parts_are_settled(service: Service) -> None:
    """The same part is still already there; another one, or a DELETE, is a conflict."""
    manifest_ = await service.upload()
    await service.finalize(manifest_)

    same = await service.put(1, ONE)
    other, deleted = await service.put(8, ONE), await service.delete(1)

    assert (200, 409, 409) == (same.status_code, other.status_code, deleted.status_code)


def break_manifest(manifest_: dict[str, Any], how: str) -> Any:
    table = manifest_["tables"][0]
    if how == "unknown_mode":
        table["mode"] = "merge"
    elif how == "duplicate_part":
        table["parquets"].append(dict(table["parquets"][0]))
        table["row_count"] += table["parquets"][0]["rows"]
    elif how == "bad_table_name":
        table["name"] = "../../other-org/orders"
    elif how == "wrong_tick":
        manifest_["tick_id"] = "another"
    elif how == "key_not_a_column":
        table["primary_keys"] = ["nope"]
    elif how == "keys_missing":
        table["primary_keys"] = []
    elif how == "row_count_mismatch":
        table["parquets"][0]["rows"] += 1
        table["row_count"] += 1
    elif how == "unknown_column":
        table["schema"].pop()
    elif how == "missing_column":
        table["schema"].append({"name": "more", "type": "long"})
    elif how == "wrong_type":
        table["schema"][1]["type"] = "double"
    elif how == "manifest_not_json":
        return b"{not json"
    elif how == "manifest_invalid":
        return b'{"tables": 7}'
    return manifest_


@pytest.mark.parametrize(
    "how",
    [
        "unknown_mode",
        "duplicate_part",
        "bad_table_name",
        "wrong_tick",
        "key_not_a_column",
        "keys_missing",
        "row_count_mismatch",
        "unknown_column",
        "missing_column",
        "wrong_type",
        "manifest_not_json",
        "manifest_invalid",
    ],
)
async def test_a_manifest_that_cannot_be_true_is_422_and_nothing_is_committed(service: Service, how: str) -> None:
    """Each lie has its own error_class, and the tick is marked failed."""
    manifest_ = await service.upload()

    answer = await service.finalize(break_manifest(manifest_, how))

    assert (422, how) == (answer.status_code, answer.json()["error_class"])
    assert answer.json()["message"]
    assert {} == await service.rows()
    assert 0 == service.queue.calls["send"]
    state = (await register_of(service.context, TickId(ORG, PROJECT, TICK)).read()).value
    assert ("failed", how) == (state.state, state.failure and state.failure.error_class)


async def test_a_tick_whose_finalize_failed_has_its_log(service: Service) -> None:
    """On its page and among the runs, with the reason. A missing part is no failure, and success is no extra run."""
    before = structlog.get_config()
    logs.configure("info", as_json=True)
    try:
        manifest_ = await service.upload()
        refused = await service.finalize(break_manifest(deepcopy(manifest_), "wrong_tick"))
    finally:
        structlog.configure(**before)
    shown = await view(service.context, TickId(ORG, PROJECT, TICK))
    (run,) = await RunReader(service.context, "ticks").latest(9)
    await service.delete(1)
    missing = await service.finalize(manifest_)
    await service.upload()
    good = await service.finalize(manifest_)

    assert (422, 409, 200) == (refused.status_code, missing.status_code, good.status_code)
    assert ("finalize", "failed", refused.json()["message"]) == (run.kind, run.state, run.reason)
    assert "warning finalize refused error_class=wrong_tick" in shown.log
    assert [run.name] == [one.name for one in await RunReader(service.context, "ticks").latest(9)]
    (listed,) = [one for one in await TicksRuns(service.context).latest(9) if one.kind == "finalize"]
    assert run.name.replace("/", "%2F") in listed.log_href


async def test_a_tick_that_is_committed_has_the_log_of_its_finalize(service: Service) -> None:
    """On its page, linked from the runs, in the state that is written anyway; silver's log follows it."""
    manifest_ = await service.upload()
    waiting = [one.log_href for one in await TicksRuns(service.context).latest(9)]
    assert 200 == (await service.finalize(manifest_)).status_code
    of = TickId(ORG, PROJECT, TICK)
    shown = await view(service.context, of)
    (listed,) = await TicksRuns(service.context).latest(9)
    row = AuditRow(ORG, PROJECT, TICK, "done", "a", 9000, 2**40, {LOG: "info silver job started"})
    await open_audit(service.context, DISPATCHED).create(row)

    assert [""] == waiting
    steps = ("finalize on", "2 parts verified", "bronze: 5 rows inserted, 0 replaced", "committed", "message")
    assert [step in line for step, line in zip(steps, shown.log.splitlines(), strict=True)] == [True] * len(steps)
    assert ("tick", listed.href) == (listed.kind, listed.log_href) and listed.href
    assert [] == await RunReader(service.context, "ticks").latest(9)
    assert f"{shown.log}\ninfo silver job started" == (await view(service.context, of)).log


@pytest.mark.parametrize("damage", ["text", "short", "cut", "footer", "lying_length"])
async def test_a_part_that_is_not_parquet_is_422(service: Service, damage: str) -> None:
    """Whatever the bytes are, the answer is typed; after the part was repaired the tick commits."""
    bad = {
        "text": b"id,note\n1,x\n" * 10,
        "short": b"PAR1",
        "cut": ONE[:-20],
        "footer": ONE[:-40] + b"\xff" * 32 + ONE[-8:],
        "lying_length": ONE[:-8] + b"\xff\xff\xff\x7f" + b"PAR1",
    }[damage]
    await service.put(1, bad)
    refused = await service.finalize(manifest({1: bad}, {1: 3}))

    await service.delete(1)
    await service.put(1, ONE)
    repaired = await service.finalize(manifest({1: ONE}, {1: 3}))

    assert (422, "not_parquet") == (refused.status_code, refused.json()["error_class"])
    assert (200, 3) == (repaired.status_code, repaired.json()["rows_inserted"])


async def test_rows_that_cannot_be_read_behind_a_right_footer_are_422(service: Service) -> None:
    """The pipeline's own refusal reaches the agent as one, and the tick can be repaired."""
    out = io.BytesIO()
    pq.write_table(pa.table({"id": pa.array(range(500), pa.int64()), "note": ["y"] * 500}), out, compression="zstd")
    whole = out.getvalue()
    damaged = whole[:4] + bytes(200) + whole[204:]
    await service.put(1, damaged)

    answer = await service.finalize(manifest({1: damaged}, {1: 500}))

    assert 422 == answer.status_code
    assert {} == await service.rows()


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (f"ticks/{TICK}/parts/x", {}, 400),
        (f"ticks/{TICK}/parts/-1", {}, 400),
        (f"ticks/{TICK}/parts/1000000", {}, 400),
        ("ticks/a..b/parts/1", {}, 400),
        ("ticks/%2e%2e/parts/1", {}, 400),
        (f"ticks/{TICK}/parts/1", {"x-sha256": "abc"}, 400),
        (f"ticks/{TICK}/parts/1", {"x-sha256": "0" * 64}, 422),
    ],
)
async def test_a_bad_part_request_is_refused_and_leaves_nothing(
    service: Service, path: str, headers: dict[str, str], status: int
) -> None:
    """Names that hide paths, hashes that are none, bytes with another hash."""
    answer = await service.ask("PUT", path, headers={"x-sha256": sha(ONE), **headers}, content=ONE)

    assert status == answer.status_code
    assert [] == [info.key async for info in service.context.store.list("ticks/v1/parts/")]


@pytest.mark.parametrize("swept", [False, True])
async def test_a_part_that_is_there_is_read_no_further_than_a_new_one(swept: bool) -> None:
    """A sender that never ends is refused at the limit too where nothing is stored: the part is there already, or the
    tick is committed and its state was swept."""
    async with serving(context_of(part_bytes_max=10_000)) as small:
        committed = await small.finalize(await small.upload())
        if swept:
            await small.context.store.delete(paths.state(TickId(ORG, PROJECT, TICK)))
        stored = [info.key async for info in small.context.store.list("ticks/v1/parts/")]
        sent: list[int] = []

        async def chunks() -> AsyncIterator[bytes]:
            for number in range(100):
                sent.append(number)
                yield b"x" * 1000

        whole = await small.put(1, parquet([1, 2, 3]))
        endless = await small.ask(
            "PUT", f"ticks/{TICK}/parts/1", headers={"x-sha256": sha(parquet([1, 2, 3]))}, content=chunks()
        )

        assert (200, 200, 413, True) == (committed.status_code, whole.status_code, endless.status_code, len(sent) < 100)
        assert stored == [info.key async for info in small.context.store.list("ticks/v1/parts/")]


async def test_a_part_over_the_limit_is_413(service: Service) -> None:
    """Known from its length, and from its bytes when it does not report its length."""
    async with serving(context_of(part_bytes_max=1000)) as small:

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"x" * 100

        declared = await small.put(1, b"x" * 2000)
        streamed = await small.ask("PUT", f"ticks/{TICK}/parts/1", headers={"x-sha256": "0" * 64}, content=chunks())

        assert (413, 413) == (declared.status_code, streamed.status_code)
        assert [] == [info.key async for info in small.context.store.list("ticks/v1/parts/")]


async def test_an_empty_part_is_422(service: Service) -> None:
    """There is no Parquet file without bytes."""
    assert 422 == (await service.put(1, b"")).status_code


async def test_keys_are_checked_for_the_pair_of_org_and_project(service: Service) -> None:
    """Another org's key, another project's secret and no key at all: each refused, and none reports what exists."""
    await service.issue("rival", "p-2")
    stolen = {"x-api-key": ORG, "x-api-secret": service.secrets["rival", "p-2"]}
    foreign = {"x-api-key": "rival", "x-api-secret": service.secrets["rival", "p-2"]}
    path = f"ticks/{TICK}/parts/1"

    wrong_secret = await service.ask("PUT", path, headers={**stolen, "x-sha256": sha(ONE)}, content=ONE)
    wrong_org = await service.ask("PUT", path, headers={**foreign, "x-sha256": sha(ONE)}, content=ONE)
    unknown = await service.ask("GET", "status", project="p-unknown")
    nothing = await service.ask("GET", "status", headers={"x-api-key": "", "x-api-secret": ""})

    assert (403, 403, 403, 401) == tuple(a.status_code for a in (wrong_secret, wrong_org, unknown, nothing))
    assert wrong_secret.json()["message"] == wrong_org.json()["message"] == unknown.json()["message"]


async def test_one_org_sees_nothing_of_anothers_tick_of_the_same_name(service: Service) -> None:
    """The same project and tick id in two orgs are two ticks."""
    await service.issue("rival", PROJECT)
    manifest_ = await service.upload()
    await service.finalize(manifest_)

    status = (await service.ask("GET", "status", org="rival")).json()
    finalized = await service.finalize(manifest_, org="rival")

    assert ([], {}) == (status["ticks"], status["states"])
    assert (409, [1, 2]) == (finalized.status_code, finalized.json()["missing"])


async def test_the_status_tells_ticks_and_owner(service: Service) -> None:
    """Newest first, with what became of each."""
    await service.finalize(await service.upload("20261115T120000__a"), tick="20261115T120000__a")
    await service.upload("20261115T120001__b")

    status = (await service.ask("GET", "status")).json()

    assert ["20261115T120001__b", "20261115T120000__a"] == [tick["tick_id"] for tick in status["ticks"]]
    assert ({"uploading": 1, "committed": 1}, "node-1") == (status["states"], status["owner"])


async def test_delta_upserts_and_full_replaces(service: Service) -> None:
    """Rows replaced and inserted are counted, mode by mode."""
    await service.finalize(await service.upload("t1"), tick="t1")
    await service.put(1, parquet([5, 6], "new"), tick="t2")
    delta = await service.finalize(manifest({1: parquet([5, 6], "new")}, {1: 2}, tick="t2"), tick="t2")
    await service.put(1, parquet([1]), tick="t3")
    full = await service.finalize(manifest({1: parquet([1])}, {1: 1}, tick="t3", mode="full"), tick="t3")

    assert (1, 1) == (delta.json()["rows_inserted"], delta.json()["rows_replaced"])
    assert (1, 6) == (full.json()["rows_inserted"], full.json()["rows_replaced"])
    assert 1 == len(await service.rows())


async def test_a_manifest_over_the_limit_is_413() -> None:
    """A manifest is read into memory, so it is bounded."""
    async with serving(context_of(manifest_bytes_max=100)) as small:
        assert 413 == (await small.finalize(json.dumps({"x": "y" * 200}).encode())).status_code
