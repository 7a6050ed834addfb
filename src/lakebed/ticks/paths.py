"""Keys of ticks. Names from requests are checked here before they become part of a key."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from lakebed.core.errors import Invalid
from lakebed.ticks.codec import FILE_SEQ_MAX
from lakebed.ticks.model import TickId

ROOT = "ticks/v1"
REPLAYS = f"{ROOT}/replays"  # one note for each replay: <tick>/<ms>-<token>.json
TIMES = f"{ROOT}/audit/times"  # one note for each commit and replay, by time
WATERMARK = f"{ROOT}/audit/watermark.json"
BRONZE_ROOT = "tables/bronze/ticks"

RESERVED_ORGS = ("batches", "topics", "queues")  # folders of bronze for the sources that have no org

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]|\.(?!\.)){0,126}")


def check_name(what: str, name: str) -> str:
    """The name, or Invalid: letters, digits, `_`, `-` and single dots, at most 127, so that a name is never a path."""
    if not _NAME.fullmatch(name) or name.endswith("."):
        raise Invalid(f"{what} {name[:80]!r} is invalid", hint="letters, digits, _ - and single dots, up to 127")
    return name


def tick_id(org_id: str, project_id: str, tick: str) -> TickId:
    if org_id in RESERVED_ORGS:
        raise Invalid(f"org {org_id!r} is a source of bronze", hint="choose another name")
    return TickId(check_name("org", org_id), check_name("project", project_id), check_name("tick", tick))


def file_seq(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or int(text) > FILE_SEQ_MAX:
        raise Invalid(f"part {text[:40]!r} is not a number from 0 to {FILE_SEQ_MAX}")
    return int(text)


def states(org_id: str, project_id: str) -> str:
    return f"{ROOT}/state/{org_id}/{project_id}/"


def state(tick: TickId) -> str:
    return f"{ROOT}/state/{tick.path}.json"


def parts(tick: TickId) -> str:
    return f"{ROOT}/parts/{tick.path}/"


def part(tick: TickId, seq: int, sha256: str, token: str) -> str:
    """A fresh name for every upload: two uploads never share an object, so one can be deleted without the other."""
    return f"{parts(tick)}{seq:06d}-{sha256[:16]}-{token}.parquet"


def commit(tick: TickId) -> str:
    return f"{ROOT}/commits/{tick.path}.json"


def lease(org_id: str, project_id: str) -> str:
    return f"{ROOT}/leases/{org_id}/{project_id}.json"


def wanted(org_id: str, project_id: str) -> str:
    return f"{ROOT}/wanted/{org_id}/{project_id}"


def secret(org_id: str, project_id: str) -> str:
    return f"{ROOT}/secrets/{org_id}/{project_id}.json"


def queue(shard: int) -> str:
    return f"{ROOT}/queue/{shard:02d}.json"


def audit(table: str, tick: TickId | None = None) -> str:
    return f"{ROOT}/audit/{table}/" + (f"{tick.path}.json" if tick else "")


def noted(at_ms: int, tick: TickId) -> str:
    """A note that a tick was committed or replayed at this time: keys sort by time."""
    return f"{times(at_ms)}~{tick.org_id}~{tick.project_id}~{tick.tick_id}"


def times(at_ms: int) -> str:
    """Sorts before every note of this time and later."""
    hour = datetime.fromtimestamp(at_ms // 1000, UTC).strftime("%Y%m%dT%H")
    return f"{TIMES}/{hour}/{at_ms:013d}"


def noted_tick(key: str) -> tuple[int, TickId]:
    at_ms, *of = key.rpartition("/")[2].split("~")
    return int(at_ms), TickId(*of)


def bronze(org_id: str, project_id: str) -> str:
    return f"{BRONZE_ROOT}/{org_id}/{project_id}"
