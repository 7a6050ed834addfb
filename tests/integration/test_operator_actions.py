"""What is done by hand is on the trail: every command that changes something, or a reason why it is none."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import cyclopts
import pytest

from lakebed.cli.main import app, run
from lakebed.cli.where import Where
from lakebed.core.ids import Ids
from lakebed.core.settings import env_name
from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.queue.model import Append
from lakebed.queue.roles import Queue
from lakebed.store.admin import client
from lakebed.ticks.adapters import open_audit
from lakebed.ticks.audit import COMMITTED, AuditRow
from lakebed.ticks.model import TickId
from support import tick_fixtures as ticks_kit

pytestmark = pytest.mark.full

TICK = TickId("acme", "shop", "20261115T120000__abc")
POLICY = """<LifecycleConfiguration><Rule><ID>tmp</ID><Status>Enabled</Status>
<Filter><Prefix>tmp/</Prefix></Filter><Expiration><Days>1</Days></Expiration></Rule></LifecycleConfiguration>"""


class Doing(NamedTuple):
    """What is typed after the command, what the trail must call it, and whether it can be tried dry."""

    words: str
    what: str
    dry: bool = False


WHY = "--reason because"
# In this order: what comes later works on what came before. `BUCKET` and `LETTER` are put in.
DEEDS: dict[str, Doing] = {
    "topics trim": Doing(f"orders --before 2 {WHY}", "log.trim", dry=True),
    "topics seek": Doing(f"orders --group g --to end {WHY}", "log.seek", dry=True),
    "topics create": Doing("made -n 2", "log.create", dry=True),
    "topics delete-group": Doing(f"orders --group g {WHY}", "log.delete-group", dry=True),
    "topics fence": Doing(f"orders {WHY}", "log.fence", dry=True),
    "topics unfence": Doing("orders", "log.unfence", dry=True),
    "topics delete": Doing(f"orders {WHY}", "log.delete", dry=True),
    "topics sweep": Doing(WHY, "log.vacuum", dry=True),
    "keys add": Doing("ops --rights log:*", "keys.add", dry=True),
    "keys rotate": Doing(f"ops {WHY}", "keys.rotate", dry=True),
    "keys revoke": Doing(f"ops {WHY}", "keys.revoke", dry=True),
    "meta sweep": Doing("", "meta.sweep", dry=True),
    "queue drain": Doing("", "queue.drain", dry=True),
    "queue dlq replay": Doing(f"LETTER {WHY}", "queue.replay", dry=True),
    "queue dlq discard": Doing(f"LETTER {WHY}", "queue.discard", dry=True),
    "queue sweep": Doing("", "queue.clean", dry=True),
    "batches resolve": Doing(f"none --action accept-existing {WHY}", "batches.accept-existing"),
    "batches reconcile": Doing("", "batches.reconcile"),
    "batches sweep": Doing(WHY, "batches.gc", dry=True),
    "batches release": Doing(f"no-agent no-boot {WHY}", "batches.release", dry=True),
    "batches retain": Doing(WHY, "batches.retain", dry=True),
    "ticks secret": Doing("--org acme --project shop", "ticks.secret", dry=True),
    "silver replay": Doing(f"--tick {TICK.tick_id} {WHY}", "ticks.replay", dry=True),
    "silver rebuild": Doing(f"--org acme --project shop {WHY}", "silver.rebuild", dry=True),
    "silver audit": Doing(f"--resend {WHY}", "silver.resend"),
    "silver dlq replay": Doing(WHY, "ticks.redrive", dry=True),
    "bronze process": Doing("", "bronze.process"),
    "bronze replay": Doing(f"--tick {TICK.tick_id} --org acme --project shop {WHY}", "bronze.replay", dry=True),
    "bronze backfill": Doing(f"--from 2026-01-01 --to 2026-01-02 {WHY}", "bronze.backfill", dry=True),
    "pipeline run": Doing("", "pipeline.run"),
    "pipeline compact": Doing("", "pipeline.compact", dry=True),
    "pipeline vacuum": Doing("", "pipeline.vacuum", dry=True),
    "tables delete": Doing(f"bronze/acme/shop/none --where id=1 {WHY}", "tables.delete", dry=True),
    "tables forget": Doing(f"acme/shop --key id=1 {WHY}", "tables.forget", dry=True),
    "pipeline rollup": Doing("--engine local", "pipeline.rollup"),
    "bucket create": Doing("deeds-other", "bucket.create", dry=True),
    "lifecycle rules put": Doing("BUCKET policy.xml", "lifecycle.rules-put", dry=True),
    "lifecycle rules import": Doing("policies.jsonl", "lifecycle.rules-import", dry=True),
    "lifecycle run": Doing("", "lifecycle.run"),
    "lifecycle apply": Doing(f"BUCKET {WHY}", "lifecycle.apply"),
    "lifecycle pause": Doing("BUCKET", "lifecycle.pause"),
    "lifecycle rebootstrap": Doing("BUCKET", "lifecycle.walk"),
    "lifecycle cadence": Doing("BUCKET none 1", "lifecycle.cadence"),
    "lifecycle reseed": Doing("--predicate", "lifecycle.reseed"),
    "lifecycle blockers retry": Doing("none", "lifecycle.retry"),
    "lifecycle blockers resume": Doing("none", "lifecycle.resume"),
    "lifecycle blockers quarantine": Doing(f"none {WHY}", "lifecycle.quarantine"),
    "lifecycle ttl set": Doing(f"BUCKET 3650 {WHY}", "lifecycle.ttl-set", dry=True),
    "lifecycle ttl stamp": Doing(f"BUCKET {WHY}", "lifecycle.ttl-stamp"),
    "lifecycle ttl rm": Doing(f"BUCKET {WHY}", "lifecycle.ttl-rm"),
    "lifecycle rules rm": Doing(f"BUCKET {WHY}", "lifecycle.rules-rm", dry=True),
}

EXEMPT: dict[str, str] = {
    "only looks, or prints": (
        "status; env; settings; completion; bucket policy; ticks key; queue status; queue waiting; queue peek; "
        "queue dump; queue dlq list; queue dlq show; agent queue; agent conflicts; agent ticks list; batches dump; "
        "batches agents; batches recent; batches conflicts; batches query; batches metrics; "
        "topics list; topics describe; topics segments; topics report; topics groups; topics dump; "
        "meta get; meta scan; meta groups; meta dump; ticks outbox; ticks status; "
        "ticks list; ticks show; ticks dump; silver status; silver show; silver dlq list; tables list; "
        "tables show; tables sample; tables how; lifecycle status; lifecycle streams; lifecycle ledger; lifecycle why; "
        "lifecycle rules list; lifecycle rules get; lifecycle rules diff; lifecycle rules export; "
        "lifecycle blockers list; lifecycle blockers isolated; lifecycle summary; lifecycle when; lifecycle ttl show; "
        "tables read; sql; contract check; pipeline plan; pipeline test; pipeline runs; keys list; trail verify; "
        "gold dry-run; gold test; gold runs"
    ),
    "data as any client sends and reads it, on record as such": (
        "queue put; topics produce; topics consume; ticks push; ticks resume; agent run"
    ),
    "works on this machine's disk alone; the agent's ledger keeps its decisions": (
        "agent drop; agent retry; agent ticks retry; ticks discard; dashboards export; pipeline docs"
    ),
    "starts or stops processes, which log it": "up; down; serve; work",
    "on a stack or a prefix of its own, gone afterwards": "demo; sim; bench; doctor",
    "changes nothing it looks at, and its findings are a record of their own": "audit; lifecycle dry-run",
}


def commands(of: cyclopts.App = app, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Every command line that help shows, by its words; former names are hidden."""
    for name in (each for each in of if not each.startswith("-") and of[each].show):
        below = [each for each in of[name] if not each.startswith("-")]
        yield from commands(of[name], (*path, name)) if below else (" ".join((*path, name)),)


def test_every_command_is_a_deed_or_says_why_it_is_none() -> None:
    """A new command fails here until somebody has decided, and, if it is a operator action, the next test runs it."""
    exempt = [name.strip() for names in EXEMPT.values() for name in names.split(";")]

    assert sorted([*DEEDS, *exempt]) == sorted(commands())


@pytest.mark.timeout(600)  # some eighty commands, each loaded as if it were typed
def test_every_command_that_changes_something_leaves_a_line(
    weed: BucketEndpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line for each, with who and why. An act that fails leaves its line too; a dry run leaves none, and no object
    is another one after it."""
    place = f"deeds-{Ids().token()}"
    client(weed.store_settings()).create_bucket(Bucket=place)
    _scene(weed, tmp_path, monkeypatch)
    (tmp_path / "policy.xml").write_text(POLICY)
    (tmp_path / "policies.jsonl").write_text(json.dumps({"bucket": place, "policy": POLICY}))

    def lakebed(*words: str) -> str:
        capsys.readouterr()
        run(words)
        return capsys.readouterr().out

    left: dict[str, set[str]] = {}
    dry: dict[str, set[tuple[str, str]]] = {}
    seen = asyncio.run(_records())
    for command, doing in DEEDS.items():
        letter = lakebed("queue", "dlq", "list", "-o", "json") if "LETTER" in doing.words else "[]"
        names = {"BUCKET": place, "LETTER": next((each["id"] for each in json.loads(letter)), "")}
        words = [*command.split(), *(names.get(word, word) for word in doing.words.split())]
        if doing.dry:
            before = asyncio.run(_objects())
            lakebed(*words, "--dry-run")
            dry[command] = asyncio.run(_objects()) ^ before
        lakebed(*words)
        left[command] = asyncio.run(_records()) - seen
        if command == "queue dlq replay":
            lakebed("queue", "drain")  # it cannot be read this time either: there is a letter to discard
        seen = asyncio.run(_records())
    actions = {action["deed_id"]: action for action in json.loads(lakebed("trail", "--limit", "200", "-o", "json"))}
    reported = {command: [_told(actions[name]) for name in names] for command, names in left.items()}

    why = {command: "because" if WHY in doing.words else "" for command, doing in DEEDS.items()}
    assert {command: [(doing.what, why[command], True)] for command, doing in DEEDS.items()} == reported
    assert {command: set[Any]() for command, doing in DEEDS.items() if doing.dry} == dry


async def _records() -> set[str]:
    """The ids of all actions there are."""
    return {action.deed_id for action in await Where().context("test").trail.latest(1000)}


async def _objects() -> set[tuple[str, str]]:
    """Every object of the lake, the trail among them, with what its content is known by."""
    return {(info.key, info.etag) async for info in Where().context("test").store.list("")}


def _told(action: dict[str, Any]) -> tuple[str, str, bool]:
    return action["what"], action["reason"], action["who"].startswith("cli:")


def _scene(weed: BucketEndpoints, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic, a batch that nobody can read, a committed tick; and no Spark within reach."""
    reported: dict[str, Any] = weed.as_settings() | {
        "store.prefix": f"deeds-{Ids().token()}",
        "meta.backend": "bucket",
        "ticks.payload_key": ticks_kit.PAYLOAD_KEY,
        "spark.remote": "sc://127.0.0.1:1",
    }
    for key, value in reported.items():
        monkeypatch.setenv(env_name(key), str(value))
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"a\nb\nc\n")))
    run(["topics", "produce", "orders"])
    asyncio.run(_seed())


async def _seed() -> None:
    context = Where().context("scene")
    queue = Queue.of(context, "default")
    key = "ingest/00000000/bad.batch"
    await context.store.create(key, b"not a batch")
    await queue.producer.append([Append("test", 1, 0, key, 11, 1)])
    row = AuditRow(TICK.org_id, TICK.project_id, TICK.tick_id, "committed", "a-1", 0, 2**40)
    await open_audit(context, COMMITTED).create(row)
