"""The S3 error handling of acceptance, answer by answer, on a server scripted to give exactly that."""

from __future__ import annotations

import msgspec
import pytest

from lakebed.batches import acceptance, paths
from lakebed.batches.model import BatchIdentity, write_record
from lakebed.store.connect import connect
from support.batch_frames import frame_of, submit
from support.batches_gateway import collector
from support.runtimes import runtime_of
from support.scripted_s3 import ScriptedS3, Step

KEY = paths.accepted_key(BatchIdentity("agent-a", "boot-1", 0, 9))
MINE = submit(frame_of())
OTHER = submit(frame_of(value=2.0))


def manifest_of(submitted: acceptance.Submission) -> bytes:
    return write_record(acceptance.manifest(submitted, at_ns=7, collector_id="elsewhere", attempt_id="theirs"))


async def upload(
    server: ScriptedS3, *, timeout_s: float = 30.0, accept_timeout_s: float = 60.0
) -> tuple[int, dict[str, object], str]:
    """Short times are for a step that hangs or a store that stays down; elsewhere a pause would pass for a fault."""
    store = connect(server.settings(timeout_s=timeout_s), runtime_of())
    async with collector(store, accept_timeout_s=accept_timeout_s) as (client, part):
        server.seen.clear()  # what a collector reads at its start is not part of an upload
        answer = await client.post("/v1/batches", content=MINE.frame)
        part.derived_writes._waiting.clear()
    return answer.status_code, answer.json(), answer.headers.get("retry-after", "")


async def test_two_creates_answered_200_are_an_acceptance() -> None:
    """The hot path is one PUT of the blob and one of the manifest, both if absent."""
    async with ScriptedS3() as server:
        status, body, _ = await upload(server)

        puts = [request for request in server.seen if request.method == "PUT"][:2]
        assert (status, body["duplicate"]) == (200, False)
        assert [MINE.blob_key, KEY] == [request.key for request in puts]
        assert [request.headers["if-none-match"] for request in puts] == ["*", "*"]
        assert server.count("GET", "accepted/v1") + server.count("GET", "raw-blobs/v1") == 0


async def test_412_on_the_blob_continues_to_the_manifest() -> None:
    """A content-addressed blob that exists is as good as one just written."""
    async with ScriptedS3(objects={MINE.blob_key: MINE.frame}) as server:
        status, body, _ = await upload(server)

        assert (status, body["duplicate"]) == (200, False)
        assert KEY in server.objects


@pytest.mark.parametrize("key", [MINE.blob_key, KEY])
async def test_409_is_retried_and_is_no_evidence_of_existence(key: str) -> None:
    """409 ConditionalRequestConflict on an absent key ends in an acceptance, not in a duplicate."""
    async with ScriptedS3([Step(409, "ConditionalRequestConflict", key=key)] * 2) as server:
        status, body, _ = await upload(server)

        assert (status, body["duplicate"]) == (200, False)
        assert {MINE.blob_key, KEY} <= set(server.objects)


@pytest.mark.parametrize("status", [412, 409])
async def test_a_manifest_that_exists_with_the_same_hash_is_a_duplicate(status: int) -> None:
    """412 and 409 alike: the manifest is read, its hash compared, and only then it is a duplicate."""
    script = [] if status == 412 else [Step(409, "ConditionalRequestConflict", key=KEY)]
    async with ScriptedS3(script, objects={KEY: manifest_of(MINE)}) as server:
        code, body, _ = await upload(server)

        assert (code, body["duplicate"], body["accepted_at_unix_ns"]) == (200, True, 7)
        assert server.count("GET", "accepted/v1") >= 1


@pytest.mark.parametrize("status", [412, 409])
async def test_a_manifest_that_exists_with_another_hash_is_a_conflict(status: int) -> None:
    """The quarantine manifest is stored before 409 identity_conflict is answered."""
    script = [] if status == 412 else [Step(409, "ConditionalRequestConflict", key=KEY)]
    async with ScriptedS3(script, objects={KEY: manifest_of(OTHER)}) as server:
        code, body, _ = await upload(server)

        assert (code, body["code"], body["quarantined"]) == (409, "identity_conflict", True)
        stored = msgspec.json.decode(server.objects[str(body["quarantine_key"])])
        assert (OTHER.sha256, MINE.sha256) == (stored["accepted_frame_sha256"], stored["submitted_frame_sha256"])
        assert manifest_of(OTHER) == server.objects[KEY]


@pytest.mark.parametrize(
    "step",
    [
        Step(503, "SlowDown", key=KEY, apply=True),
        Step(500, key=KEY, apply=True),
        Step(key=KEY, apply=True, reset=True),
        Step(key=KEY, apply=True, hang_s=60),
        Step(503, "SlowDown", key=KEY),
        Step(key=KEY, reset=True),
        Step(key=KEY, hang_s=60),
    ],
)
async def test_a_lost_answer_to_the_manifest_ends_as_our_own_acceptance(step: Step) -> None:
    """503, reset or timeout, applied or not: resolved by creating again or reading; one manifest, duplicate=false."""
    async with ScriptedS3([step]) as server:
        status, body, _ = await upload(server, timeout_s=1.0 if step.hang_s else 30.0)

        assert (status, body["duplicate"]) == (200, False)
        assert sum(key.startswith("accepted/v1/") for key in server.objects) == 1


@pytest.mark.full
async def test_a_store_that_stays_down_before_the_manifest_is_503() -> None:
    """The agent must retry; the blob may be an orphan; nothing was accepted."""
    async with ScriptedS3([Step(503, "SlowDown", key=KEY)] * 300) as server:
        status, body, retry_after = await upload(server, accept_timeout_s=4.0)

        assert (status, retry_after) == (503, "2")
        assert KEY not in server.objects
        assert MINE.blob_key in server.objects
        server.script.clear()
        again, body, _ = await upload(server)
        assert (again, body["duplicate"]) == (200, False)


async def test_an_applied_manifest_whose_answer_never_comes_is_found_by_the_retry() -> None:
    """503 to the end although the manifest exists: the next upload observes it and reports duplicate."""
    lost = [Step(503, "SlowDown", key=KEY, apply=True), *[Step(503, "SlowDown", key=KEY)] * 50]
    blind = [Step(503, "SlowDown", method="GET", key=KEY)] * 50
    async with ScriptedS3([*lost, *blind]) as server:
        first, _, _ = await upload(server, accept_timeout_s=4.0)
        server.script.clear()
        second, body, _ = await upload(server)

        assert (first, second, body["duplicate"]) == (503, 200, True)
        assert sum(key.startswith("accepted/v1/") for key in server.objects) == 1


async def test_credentials_that_are_refused_are_503_for_the_agent() -> None:
    """A collector that may not write is the operator's trouble: the agent keeps its batch and comes back."""
    async with ScriptedS3([Step(403, "AccessDenied", key=MINE.blob_key)] * 9) as server:
        status, _, _ = await upload(server)

        assert status == 503
        assert not server.objects
