"""`lakebed batches` and `lakebed tables`: what is shown, what is decided, and what needs a reason."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import msgspec
import pytest

from lakebed.batches import paths
from lakebed.batches.acceptor import Acceptor
from lakebed.batches.derived_writes import DerivedWrites
from lakebed.batches.model import IdentityConflict
from lakebed.cli import exits
from lakebed.core.errors import Invalid, NotFound
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from support.batch_frames import frame_of, submit
from support.runtimes import runtime_on
from support.shell import Shell


def accept(shell: Shell, *frames: bytes) -> None:
    """Has these frames accepted, or quarantined where their identity is taken; everything derived is written."""
    clock, ids, metrics = shell.clock, Ids(), Metrics()

    async def work() -> None:
        derived_writes = DerivedWrites(runtime_on(shell.store, clock, ids=ids, metrics=metrics), waiting_max=100)
        derived_writes.start()
        acceptor = Acceptor(
            runtime_on(shell.store, clock, ids=ids, metrics=metrics),
            derived_writes,
            collector_id="c",
            on_accepted=lambda accepted, submitted: None,
            accepting_max=10,
            known_max=10,
            timeout_s=5.0,
            retry_after_s=2.0,
        )
        for frame in frames:
            try:
                await acceptor.accept(submit(frame))
            except IdentityConflict:
                continue
        await derived_writes.stop(drain_s=5.0)

    asyncio.run(work())


@pytest.fixture
def filled(shell: Shell) -> Shell:
    """Three batches of two agents, and a conflict about the first."""
    now_ns = shell.clock.now_ns() - 60 * 10**9
    accept(
        shell,
        frame_of(0, 9, at_ns=now_ns),
        frame_of(10, 19, at_ns=now_ns),
        frame_of(0, 4, agent="agent-b", at_ns=now_ns),
        frame_of(0, 9, value=7.0, at_ns=now_ns),
    )
    return shell


def test_a_frame_is_dumped_from_a_file_or_by_its_accepted_manifest(filled: Shell, tmp_path: Path) -> None:
    """As many samples as requested, numbered from the batch's first."""
    file = tmp_path / "x.lmbatch"
    file.write_bytes(frame_of(10, 39))
    local = filled.data("batches", "dump", str(file))
    few = filled.data("batches", "dump", str(file), "--limit", "2")
    key = next(key for key in filled.keys("accepted/v1/") if "-00000000000000000019.json" in key)
    stored = filled.data("batches", "dump", key)
    missing, _, _ = filled("batches", "dump", "accepted/v1/none.json")

    assert ("agent-a", "boot-1", 10, 39, 20) == (
        local["agent_id"], local["boot_id"], local["seq_start"], local["seq_end"], len(local["samples"]),
    )  # fmt: skip
    assert [10, 11] == [sample["seq"] for sample in few["samples"]]
    assert ({"host": "h0"}, "cpu", "gauge", 11.0) == tuple(
        few["samples"][0][name] for name in ("labels", "metric", "kind", "value")
    )
    assert (10, 19, 10) == (stored["seq_start"], stored["seq_end"], len(stored["samples"]))
    assert stored["frame_sha256"] in stored["manifest"]["raw_blob_key"]
    assert exits.code_for(NotFound("")) == missing


def test_an_empty_file_is_dumped_as_what_it_is_and_not_looked_for_in_the_bucket(shell: Shell, tmp_path: Path) -> None:
    """A spool begins with an empty segment; a frame is never empty."""
    segment, frame = tmp_path / "1.spool", tmp_path / "x.lmbatch"
    segment.touch()
    frame.touch()

    code, _, why = shell("batches", "dump", str(frame))

    assert [] == shell.data("batches", "dump", str(segment))
    assert exits.code_for(Invalid("")) == code, why


def test_agents_and_their_newest_batches_are_shown(filled: Shell) -> None:
    """Every agent once; recent batches up to a limit."""
    agents = filled.data("batches", "agents")
    every, few = filled.data("batches", "recent"), filled.data("batches", "recent", "--limit", "2")

    assert {"agent-a", "agent-b"} == {row["agent_id"] for row in agents} and 2 == len(agents)
    assert (3, every[:2]) == (len(every), few)


def test_however_many_recent_batches_are_asked_for_only_so_many_are_looked_at(
    filled: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket of years is not listed for a large --limit, and the reader is told."""
    monkeypatch.setattr("lakebed.batches.view.NEWEST_MAX", 2)

    _, shown, told = filled("batches", "recent", "--limit", "1000000", "-o", "json")

    assert 2 == len(msgspec.json.decode(shown))
    assert "only the newest 2 are shown" in told


def test_a_conflict_is_listed_shown_and_decided_once(filled: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has both hashes; a dry run decides nothing; a decision closes it, on the trail with its reason."""
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    _, table, _ = filled("batches", "conflicts")
    header, line = (text.split("\t") for text in table.splitlines())
    row = dict(zip(header, line, strict=True))
    ident = row["conflict"]
    shown = json.loads(filled("batches", "conflicts", ident)[1])
    decide = ("batches", "resolve", ident, "--action", "accept-existing", "--reason", "tests")

    _, _, would = filled(*decide, "--dry-run")
    still = filled.data("batches", "conflicts", "--open")
    decided = filled.data(*decide)
    open_now, every = filled.data("batches", "conflicts", "--open"), filled.data("batches", "conflicts")
    behind = filled.data("batches", "conflicts", "--after", ident)

    assert ("agent-a", "boot-1", "0-9", "") == (row["agent"], row["boot"], row["range"], row["resolved"])
    record = shown["record"]
    assert (record["accepted_frame_sha256"][:16], record["submitted_frame_sha256"][:16]) == (
        row["accepted"], row["submitted"],
    )  # fmt: skip
    assert ("would resolve it as accept-existing", 1) == (would.strip(), len(still))
    assert ("accept_existing", "tests", "cli:ann") == tuple(
        decided["resolution"][name] for name in ("action", "reason", "resolved_by")
    )
    assert (0, 1, []) == (len(open_now), len(every), behind)
    assert "accept_existing" in filled("batches", "conflicts")[1]
    assert [("batches.accept-existing", {"conflict_id": ident}, "tests", "done", "")] == filled.deeds()


def test_garbage_is_collected_by_hand_for_a_reason_alone(filled: Shell) -> None:
    """A dry run needs none and is not on the trail."""
    blank, _, why = filled("batches", "sweep", "--reason", " ")
    dry, _, would = filled("batches", "sweep", "--dry-run")
    none = filled.deeds()
    code, _, did = filled("batches", "sweep", "--reason", "space", "--source", "by-time")

    assert exits.code_for(Invalid("")) == blank and "a reason is required" in why
    assert (exits.OK, []) == (dry, none) and "would do: " in would
    assert exits.OK == code and "done: " in did and "(space)" in did
    ((what, subject, reason, outcome, _),) = filled.deeds()
    assert ("batches.gc", {"source": "by-time"}, "space", "done") == (what, subject, reason, outcome)


def test_old_batches_are_removed_by_hand_for_a_reason_alone(filled: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run needs none, counts what would go and changes nothing. The first pass only records what will go."""
    monkeypatch.setenv("LAKEBED_BATCHES_RETENTION_DAYS", "2")
    filled("batches", "reconcile")
    young = filled.data("batches", "retain", "--dry-run")
    filled.clock.ahead_s += 3 * 86_400
    before = filled.keys()
    blank, _, why = filled("batches", "retain", "--reason", " ")
    dry = filled.data("batches", "retain", "--dry-run")
    kept, none = filled.keys(), [deed for deed in filled.deeds() if deed[0] == "batches.retain"]
    first = filled.data("batches", "retain", "--reason", "space")
    filled.clock.ahead_s += 2 * 3600
    again = filled.data("batches", "retain", "--dry-run")
    second = filled.data("batches", "retain", "--reason", "space")
    deeds = [deed for deed in filled.deeds() if deed[0] == "batches.retain"]

    assert exits.code_for(Invalid("")) == blank and "a reason is required" in why
    assert (0, True, 3, True) == (young["removed_batches"], dry["dry_run"], dry["removed_batches"], again["dry_run"])
    assert (before, []) == (kept, none)
    assert (0, 3, 3) == (first["removed_batches"], again["removed_batches"], second["removed_batches"])
    assert 0 == len(filled.keys(paths.ACCEPTED))
    assert [("space", f"{n} batches, {size} bytes removed") for n, size in ((3, second["removed_bytes"]), (0, 0))] == [
        (reason, detail) for _, _, reason, _, detail in deeds
    ]


@pytest.mark.parametrize(("flag", "kind"), [((), "new"), (("--cold",), "cold")])
def test_a_repair_says_what_it_checked(filled: Shell, flag: tuple[str, ...], kind: str) -> None:
    """Of new batches or cold, as the trail reports."""
    report = filled.data("batches", "reconcile", *flag)

    assert {"path", "checked", "repaired"} == set(report)
    ((what, subject, _, outcome, detail),) = filled.deeds()
    assert ("batches.reconcile", {"from": kind}, "done") == (what, subject, outcome)
    assert f"{sum(report['repaired'].values())} repaired" == detail


def test_only_a_cold_repair_finds_what_is_missing_from_long_ago(filled: Shell) -> None:
    """The watermark is past it; --cold looks at every accepted batch and writes the index again."""
    filled.clock.ahead_s = 60.0
    filled("batches", "reconcile")
    (lost,) = filled.keys(paths.ACCEPTED_INDEX)
    asyncio.run(filled.store.delete(lost))
    filled.clock.ahead_s = 3 * 86_400.0

    late = filled.data("batches", "reconcile")
    missing = filled.keys(paths.ACCEPTED_INDEX)
    cold = filled.data("batches", "reconcile", "--cold")

    assert (0, []) == (sum(late["repaired"].values()), missing)
    assert 3 == cold["repaired"]["indexed"]
    assert 1 == len(filled.keys(paths.ACCEPTED_INDEX))


def test_without_findings_there_is_nothing_to_repair(filled: Shell) -> None:
    """No audit was made: that is reported, and is no error."""
    code, out, err = filled("batches", "reconcile", "--findings")

    assert (exits.OK, "") == (code, out) and "nothing to do" in err
    assert "nothing to repair" == filled.deeds()[0][4]


def test_a_query_selects_by_metric_labels_and_time(filled: Shell) -> None:
    """The newest alone, a matcher, and a time that is too short."""
    every = filled.data("batches", "query", "cpu")
    one = filled.data("batches", "query", "cpu", "--match", "host=h1")
    other = filled.data("batches", "query", "cpu", "--match", "host!=h1")
    latest = filled.data("batches", "query", "cpu", "--latest")
    short = filled.data("batches", "query", "cpu", "--since-s", "1")

    def hosts(answer: Any) -> list[str]:
        return sorted({one["labels"]["host"] for one in answer["series"]})

    assert (["h0", "h1"], ["h1"], ["h0"]) == (hosts(every), hosts(one), hosts(other))
    assert (["h0", "h1"], []) == (hosts(latest), hosts(short))
    assert len(json.dumps(latest)) < len(json.dumps(every))


def test_an_unknown_metric_is_not_found_and_the_nearest_names_are_shown(filled: Shell) -> None:
    """So that a typing error does not look like a metric without samples."""
    code, _, near = filled("batches", "query", "cpuu")
    _, _, far = filled("batches", "query", "disk_free_bytes")

    assert exits.code_for(NotFound("")) == code
    assert "did you mean cpu?" in near and "lakebed batches metrics" in far


def test_metrics_are_listed_with_their_labels(filled: Shell) -> None:
    """Name, number of series and names of labels, for people and for programs; a past range has none."""
    _, table, _ = filled("batches", "metrics")
    found = filled.data("batches", "metrics")
    _, _, none = filled("batches", "metrics", "--from", "2020-01-01T00:00:00Z", "--to", "2020-01-02T00:00:00Z")

    assert "metric\tseries\tlabels" == table.splitlines()[0] and "cpu\t" in table
    assert ["host"] == next(each["labels"] for each in found["metrics"] if each["metric"] == "cpu")
    assert "(nothing)" in none


def test_points_are_shown_with_iso_times_and_taken_by_them(filled: Shell) -> None:
    """A table has a time, a value and labels; a time without its offset is refused."""
    _, table, why = filled("batches", "query", "cpu", "--from", "2020-01-31T12:00:00Z", "--to", "2020-01-31T13:00:00Z")
    code, rows, partial = filled("batches", "query", "cpu", "--latest")
    refused, _, hint = filled("batches", "query", "cpu", "--from", "2020-01-31T12:00:00")

    assert ("", True) == (table, "no metric cpu" in why)
    assert exits.OK == code and re.match(r"time\tvalue\tlabels\n20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\t", rows)
    assert "may be incomplete: read without the live state" in partial
    assert exits.code_for(Invalid("")) == refused and "add Z" in hint


def test_a_running_stacks_gateway_answers_and_its_answer_is_complete(
    filled: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway knows what was accepted a moment ago; one that wants a key is left aside for the bucket."""
    asked: list[tuple[str, Any]] = []
    complete = {"partial": False, "why_partial": [], "series": [{"labels": {"host": "h9"}, "points": [[10**18, 1.5]]}]}

    def get(url: str, *, params: Any, **_: Any) -> httpx2.Response:
        asked.append((url, dict(params)["metric"]))
        return httpx2.Response(status, json=complete)

    monkeypatch.setattr("lakebed.embedded.endpoints.find", lambda folder: SimpleNamespace(gateway="http://gw:1"))
    monkeypatch.setattr("lakebed.batches.query_commands.httpx2.get", get)
    status = 200
    _, table, words = filled("batches", "query", "cpu")
    status = 401
    _, own, _ = filled("batches", "query", "cpu")

    assert ("time\tvalue\tlabels\n2001-09-09T01:46:40.000Z\t1.5\thost=h9\n", "") == (table, words)
    assert [("http://gw:1/v1/query/range", "cpu")] * 2 == asked and "host=h0" in own


def test_a_gateway_is_asked_for_what_was_typed_and_its_windows_are_shown_by_column(
    filled: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every option travels; a refusal of the gateway is the command's own."""
    asked: list[tuple[str, list[tuple[str, str]]]] = []
    bucket = [10**18, 3, 6.5, 1.0, 3.5, 10**18 + 5, 2.0, 0, [2.25, 3.25]]
    windows = {
        "partial": True, "why_partial": ["one thing", "another"], "resolution_s": 60, "quantiles": [0.5, 0.99],
        "sources": {"rollup": 2, "live": 0, "raw": 1}, "series": [{"labels": {"host": "h9"}, "buckets": [bucket]}],
    }  # fmt: skip
    answers = [
        httpx2.Response(200, json=windows),
        httpx2.Response(200, json={**windows, "series": [{"labels": {}, "points": [[1, 2.0]]}]}),
        httpx2.Response(400, json={"message": "no such window", "hint": "take another"}),
    ]

    def get(url: str, *, params: Any, **_: Any) -> httpx2.Response:
        asked.append((url, list(params)))
        return answers[len(asked) - 1]

    monkeypatch.setattr("lakebed.embedded.endpoints.find", lambda folder: SimpleNamespace(gateway="http://gw:1"))
    monkeypatch.setattr("lakebed.batches.query_commands.httpx2.get", get)
    between = ("--from", "1970-01-01T00:00:01Z", "--to", "1970-01-01T00:00:02Z")
    matched = ("--match", "host=h9", "--match", "zone!=eu")
    _, table, words = filled(
        "batches", "query", "cpu", *matched, *between, "--window-s", "60", "--q", "0.5", "--q", "0.99"
    )
    filled("batches", "query", "cpu", *matched, "--latest", "--since-s", "90")
    refused, _, why = filled("batches", "query", "cpu", *between, "--window-s", "7")

    header, row = (line.split("\t") for line in table.splitlines())
    assert {
        "time": "2001-09-09T01:46:40.000Z", "count": "3", "sum": "6.5", "min": "1.0", "max": "3.5", "last": "2.0",
        "q0.5": "2.25", "q0.99": "3.25", "labels": "host=h9",
    } == dict(zip(header, row, strict=True))  # fmt: skip
    assert "from rollups of 60 s: 2 rollup, 1 raw" in words and "may be incomplete: one thing; another" in words
    of = [("metric", "cpu"), ("match", "host=h9"), ("match", "zone!=eu")]
    span = [("from", str(10**9)), ("to", str(2 * 10**9))]
    assert [
        ("http://gw:1/v1/query/range", [*of, *span, ("window_s", "60"), ("q", "0.5"), ("q", "0.99")]),
        ("http://gw:1/v1/query/latest", [*of, ("lookback_s", "90.0")]),
        ("http://gw:1/v1/query/range", [of[0], *span, ("window_s", "7")]),
    ] == asked
    assert exits.code_for(Invalid("")) == refused and "no such window" in why and "take another" in why


def test_the_newest_point_is_searched_as_far_back_as_was_said(shell: Shell) -> None:
    """A series that was last heard of two hours ago is found when three are searched, and not when one is."""
    accept(shell, frame_of(0, 9, at_ns=shell.clock.now_ns() - 7200 * 10**9))

    found = [
        len(shell.data("batches", "query", "cpu", "--latest", "--since-s", str(hours * 3600))["series"])
        for hours in (1, 3)
    ]

    assert 0 == found[0] < found[1]


@pytest.mark.parametrize(
    "other", [("--window-s", "60"), ("--from", "2025-10-09T08:00:00Z"), ("--to", "2025-10-09T08:00:00Z")]
)
def test_the_newest_point_has_no_windows_and_no_other_range(filled: Shell, other: tuple[str, str]) -> None:
    """What would be left out of the answer is refused, whoever answers."""
    code, out, why = filled("batches", "query", "cpu", "--latest", *other)

    assert (exits.code_for(Invalid("")), "") == (code, out)
    assert "--latest" in why and "--since-s" in why


def test_windows_have_quantiles_and_points_do_not(filled: Shell) -> None:
    """Quantiles without windows are refused; windows report which rollups they came from."""
    refused, _, why = filled("batches", "query", "cpu", "--q", "0.5")
    code, out, words = filled("batches", "query", "cpu", "--window-s", "60", "--q", "0.5")

    assert exits.code_for(Invalid("")) == refused and "--window-s" in why
    assert exits.OK == code and words.startswith("from ")
    assert "0.5" in out
