"""A page's JSON twin and the command's `-o json` are one piece of code: on a real lake they report the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from lakebed.cli.main import run
from lakebed.embedded.endpoints import BucketEndpoints
from support.console_stack import ORG, PROJECT, Yard, yard_on

pytestmark = pytest.mark.full

TICK, TABLE = "20261116T120000__0000", f"bronze/ticks/{ORG}/{PROJECT}/orders"
MOVING = {"age_s", "pending_age_s", "claimed_age_s", "done_age_s", "claimed_s", "lag_s", "behind_s", "stale_claims"}
SAME = [
    ("/batches.json", "agents", "batches agents"),
    ("/batches.json", "recent", "batches recent"),
    ("/batches.json", "conflicts", "batches conflicts"),
    ("/log.json?topic=orders", "topics", "topics list"),
    ("/log.json?topic=orders", "partitions", "topics describe orders"),
    ("/log.json?topic=orders", "segments", "topics segments orders"),
    ("/log.json?topic=orders", "report", "topics report"),
    ("/queue.json?queue=orders", "queues", "queue status"),
    ("/queue.json?queue=orders", "waiting", "queue waiting -q orders"),
    ("/queue.json?queue=orders", "letters", "queue dlq list -q orders"),
    (f"/ticks.json?org={ORG}&project={PROJECT}&tick={TICK}", "projects", "ticks list"),
    (f"/ticks.json?org={ORG}&project={PROJECT}&tick={TICK}", "tick", f"ticks show {TICK} --org {ORG} -p {PROJECT}"),
    ("/ticks.json", "silver", "silver status"),
    ("/ticks.json", "letters", "silver dlq list"),
    (f"/tables.json?table={TABLE}", "tables", "tables list"),
    (f"/tables.json?table={TABLE}", "table", f"tables show {TABLE}"),
    (f"/tables.json?table={TABLE}", "rows", f"tables sample {TABLE}"),
    (f"/tables.json?table={TABLE}", "snippets", f"tables how {TABLE}"),
    ("/lifecycle.json?bucket=landing", "actions", "lifecycle status"),
    ("/lifecycle.json?bucket=landing", "blockers", "lifecycle blockers list"),
    ("/lifecycle.json?bucket=landing", "streams", "lifecycle streams"),
    ("/lifecycle.json?bucket=landing", "rules", "lifecycle rules list"),
    ("/lifecycle.json?bucket=landing", "ledger", "lifecycle ledger landing"),
    ("/audit.json", "deeds", "trail"),
]


@pytest.fixture(scope="module")
def test_env(weed: BucketEndpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    with yard_on(weed, tmp_path_factory.mktemp("yard")) as made:
        made.seed()
        yield made


def test_the_twin_says_what_the_command_says(
    test_env: Yard, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every thing a page shows and a command prints is the same JSON, times that pass aside; none of it is empty."""
    for name, value in test_env.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(test_env.folder)
    act(test_env)
    differ: list[str] = []
    twins: dict[str, Any] = {}

    for path, thing, command in SAME:
        if path not in twins:
            twins[path] = httpx2.get(f"{test_env.url}{path}", timeout=60).json()
        twin = twins[path]
        code = run([*command.split(), "-o", "json"])
        output = capsys.readouterr()
        if code != 0 or still(json.loads(output.out)) != still(twin[thing]):
            differ.append(f"{command}: {output.out[:600]} {output.err[:300]}\n  twin: {json.dumps(twin[thing])[:600]}")

    assert differ == []
    full = [thing for path, thing, _ in SAME if twins[path][thing]]
    assert set(full) >= {"agents", "conflicts", "topics", "segments", "queues", "letters", "tick", "rows", "deeds"}


def act(test_env: Yard) -> None:
    """One thing done by hand, through the page, so that there is a trail to report."""
    import re

    with httpx2.Client(base_url=test_env.url, timeout=60) as client:
        token = re.search(r'x-csrf-token": "([0-9a-f]+)"', client.get("/lifecycle").text)
        assert token is not None
        headers = {"origin": test_env.url, "x-csrf-token": token[1]}
        answer = client.post("/console/do/lifecycle.walk", data={"bucket": "landing"}, headers=headers)
        assert answer.status_code == 200, answer.text


def still(value: Any) -> Any:
    """The value without what changes while one looks."""
    if isinstance(value, dict):
        return {name: still(one) for name, one in value.items() if name not in MOVING}
    return [still(one) for one in value] if isinstance(value, list) else value
