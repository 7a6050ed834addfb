"""`lakebed agent`: the owner's commands on a queue folder, and what `run` passes to the agent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lakebed.agent.alerts import Alerts
from lakebed.agent.batcher import make_frame
from lakebed.agent.disk_queue import DiskQueue, QueueLimits
from lakebed.agent.model import Frame, ParkedBatch
from lakebed.agent.settings import AgentSettings, TickFolder
from lakebed.batches.model import BatchIdentity, Sample
from lakebed.cli import exits
from lakebed.core.errors import Invalid, NotFound
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Secret
from lakebed.ticks.outbox import Outbox, OutboxTick
from lakebed.ticks.packing import PackedTick
from lakebed.ticks.settings import TicksSettings
from lakebed.ticks.uploader import Uploader
from lakebed.wiring import agent_commands
from lakebed.wiring.agent_commands import ROUND_TRIES
from support.runtimes import runtime_of
from support.shell import Shell


def framed(number: int) -> Frame:
    return make_frame(BatchIdentity("a", "boot", number, number), [Sample("m", 1, float(number))])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A queue with the batches 0 to 2 waiting and 3 to 4 parked, 4 for longer."""
    limits = QueueLimits(bytes_max=10**6, batches_max=100)
    disk_queue = DiskQueue.open(tmp_path / "queue", agent_id="a", boot_id="boot", limits=limits, now_ms=lambda: 0)
    stored = disk_queue.append([framed(number) for number in range(5)]).stored
    for at_ms, entry in ((2000, stored[3]), (1000, stored[4])):
        disk_queue.park(
            entry,
            ParkedBatch("a", "boot", entry.seq_start, entry.seq_end, "rejected", entry.sha256, at_ms, entry.size_bytes),
        )
    disk_queue.close()
    return tmp_path / "queue"


def in_queue(folder: Path, part: str) -> list[int]:
    return sorted(int(path.name.split("-")[0].rpartition(".")[2]) for path in (folder / part).rglob("*.lmbatch"))


def test_the_queue_is_shown_by_boot_or_by_batch_with_its_alerts(shell: Shell, folder: Path) -> None:
    """Alerts are words on stderr, rows are data on stdout."""
    Alerts(folder / "alerts", metrics=Metrics(), now_ms=lambda: 5).on("denied", "wrong token")

    (boot,) = shell.data("agent", "queue", "--queue-dir", str(folder))
    batches = shell.data("agent", "queue", "--batches", "--queue-dir", str(folder))
    _, _, words = shell("agent", "queue", "--queue-dir", str(folder))

    assert ("boot", 3, 3, 0, 2) == tuple(boot[n] for n in ("boot_id", "batches", "samples", "seq_start", "seq_end"))
    assert [0, 1, 2] == [row["seq_start"] for row in batches]
    assert "alert: denied (1): wrong token" == words.strip()


def test_the_queue_folder_comes_from_the_settings_unless_it_is_named(
    shell: Shell, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without a queue is not found, with the option that names another."""
    missing, _, err = shell("agent", "queue")
    monkeypatch.setenv("LAKEBED_AGENT_QUEUE_DIR", str(folder))
    found = shell.data("agent", "queue")

    assert exits.code_for(NotFound("")) == missing
    assert "--queue-dir" in err
    assert 3 == found[0]["batches"]


def test_parked_batches_are_listed_longest_parked_first(shell: Shell, folder: Path) -> None:
    """A table has the columns that decide, JSON has all."""
    rows = shell.data("agent", "conflicts", "--queue-dir", str(folder))
    _, table, _ = shell("agent", "conflicts", "--queue-dir", str(folder))

    assert [4, 3] == [row["seq_start"] for row in rows]
    assert [
        "reason", "boot_id", "seq_start", "seq_end", "submitted_frame_sha256", "accepted_frame_sha256", "message",
    ] == table.splitlines()[0].split("\t")  # fmt: skip
    assert {"parked_at_ms", "status", "collector"} <= set(rows[0])


def test_a_drop_deletes_what_is_named_and_a_dry_one_nothing(shell: Shell, folder: Path) -> None:
    """Queued or parked; the ledger has the reason."""
    where = ("--queue-dir", str(folder))
    names = (framed(1).sha256[:8], framed(3).sha256[:8])

    _, listed, would = shell("agent", "drop", *names, "--reason", "test data", "--dry-run", *where)
    before = (in_queue(folder, "boots"), in_queue(folder, "parked"))
    _, _, did = shell("agent", "drop", *names, "--reason", "test data", *where)

    assert ("would drop 2 batches", "dropped 2 batches") == (would.strip(), did.strip())
    assert 3 == len(listed.splitlines())
    assert ([0, 1, 2], [3, 4]) == before
    assert ([0, 2], [4]) == (in_queue(folder, "boots"), in_queue(folder, "parked"))
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert [("dropped_by_owner", "test data", 1, "queued"), ("dropped_by_owner", "test data", 3, "parked")] == [
        (line["what"], line["reason"], line["seq_start"], line["state"])
        for line in lines
        if line["what"] == "dropped_by_owner"
    ]


def test_everything_parked_is_dropped_at_once_and_what_waits_stays(shell: Shell, folder: Path) -> None:
    """Together with a batch that is named beside it, which counts once."""
    code, _, did = shell(
        "agent", "drop", framed(4).sha256[:8], "--all-parked", "--reason", "r", "--queue-dir", str(folder)
    )

    assert (exits.OK, "dropped 2 batches") == (code, did.strip())
    assert ([0, 1, 2], []) == (in_queue(folder, "boots"), in_queue(folder, "parked"))
    assert [] == [path.name for path in (folder / "parked").iterdir()]


def test_a_retry_returns_parked_batches_alone(shell: Shell, folder: Path) -> None:
    """One that waits already cannot be named; a dry run moves nothing."""
    where = ("--queue-dir", str(folder))
    waiting, _, err = shell("agent", "retry", framed(0).sha256[:8], "--reason", "r", *where)
    _, _, would = shell("agent", "retry", "--all-parked", "--reason", "r", "--dry-run", *where)
    before = in_queue(folder, "parked")
    _, _, did = shell("agent", "retry", framed(3).sha256[:8], "--reason", "r", *where)

    assert exits.code_for(Invalid("")) == waiting and "names 0 batches" in err
    assert ("would return 2 batches", "returned 1 batches") == (would.strip(), did.strip())
    assert ([3, 4], [4], [3]) == (before, in_queue(folder, "parked"), in_queue(folder, "returned"))


@pytest.mark.parametrize("verb", ["drop", "retry"])
@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("--all-parked", "--reason", "  "), "--reason is empty"),
        (("--reason", "r"), "no batch is named"),
        (("", "--reason", "r"), "names"),
        (("abcde", "--reason", "r"), "at least 6 characters"),
        (("000000000000", "--reason", "r"), "names 0 batches"),
    ],
)
def test_an_owner_says_what_and_why(
    shell: Shell, folder: Path, verb: str, words: tuple[str, ...], reported: str
) -> None:
    """Nothing is touched without a reason and a name that fits one batch."""
    code, _, err = shell("agent", verb, *words, "--queue-dir", str(folder))

    assert exits.code_for(Invalid("")) == code
    assert reported in err
    assert ([0, 1, 2], [3, 4]) == (in_queue(folder, "boots"), in_queue(folder, "parked"))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[AgentSettings]:
    """The settings that `agent run` would run with."""
    seen: list[AgentSettings] = []

    async def run(settings: AgentSettings, ticks: TicksSettings) -> Metrics:
        seen.append(settings)
        return Metrics()

    monkeypatch.setattr(agent_commands, "_run", run)
    return seen


def test_the_flags_of_run_become_settings(shell: Shell, ran: list[AgentSettings], tmp_path: Path) -> None:
    """Each flag sets its own key; none is lost."""
    code, _, err = shell(
        "agent", "run", "--collector", "http://c1", "--collector", "http://c2", "--agent-id", "me",
        "--queue-dir", str(tmp_path / "q"), "--stdin", "--host-interval-s", "7.5", "--otlp-port", "0",
        "--scrape", "http://t/metrics",
    )  # fmt: skip

    (made,) = ran
    assert (exits.OK, "0 samples were read, 0 sent; 0 lines were rejected\n") == (code, err)
    assert (("http://c1", "http://c2"), "me", tmp_path / "q") == (made.collectors, made.agent_id, made.queue_dir)
    assert (True, 7.5, 0, ["http://t/metrics"]) == (
        made.stdin, made.host_interval_s, made.otlp_port, [target.url for target in made.scrape],
    )  # fmt: skip


def test_rejected_lines_of_standard_input_are_counted_in_the_exit_code(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line says how many samples were read and sent, and how many lines were not taken."""

    async def run(settings: AgentSettings, ticks: TicksSettings) -> Metrics:
        metrics = Metrics()
        metrics.counter("lakebed_agent_samples_total").inc(2)
        metrics.counter("lakebed_agent_sent_samples_total").inc(2)
        metrics.counter("lakebed_agent_bad_samples_total").labels("stdin").inc(5)
        return metrics

    monkeypatch.setattr(agent_commands, "_run", run)
    code, _, err = shell("agent", "run", "--collector", "http://c", "--stdin")

    assert (exits.FAILED, "2 samples were read, 2 sent; 5 lines were rejected") == (code, err.strip())


@pytest.mark.parametrize(
    "source",
    [("--stdin",), ("--otlp-port", "0"), ("--scrape", "http://t"), ("--host-interval-s", "1")],
)
def test_an_agent_without_a_source_says_so(shell: Shell, ran: list[AgentSettings], source: tuple[str, ...]) -> None:
    """Any source is enough; without one only the queue is sent, which is no error."""
    code, _, without = shell("agent", "run", "--collector", "http://c")
    _, _, with_one = shell("agent", "run", "--collector", "http://c", *source)

    assert exits.OK == code
    assert "no source is set" in without and "no source is set" not in with_one


def test_a_running_stack_is_the_collector_when_none_is_named(
    shell: Shell, ran: list[AgentSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is named wins."""
    monkeypatch.setattr(agent_commands, "_stack_gateway", lambda where: "http://127.0.0.1:9")

    _, _, reported = shell("agent", "run", "--stdin")
    shell("agent", "run", "--stdin", "--collector", "http://mine")

    assert [("http://127.0.0.1:9",), ("http://mine",)] == [made.collectors for made in ran]
    assert "http://127.0.0.1:9" in reported


async def open_courier(each: TickFolder, agent_settings: dict[str, Any], ticks: dict[str, Any]) -> str:
    settings, of_ticks = AgentSettings.of(agent_settings), TicksSettings.of(ticks)
    opened = agent_commands.folder_uploader(each, settings, of_ticks, lambda kind, message: None, runtime_of())
    async with opened as worker:
        return worker.name


@pytest.mark.parametrize(
    ("folder", "of_agent", "of_ticks", "works"),
    [
        ({"org_id": "o", "api_secret": Secret("s"), "urls": ("http://u",)}, {}, {}, True),
        ({}, {"collectors": ["http://c"]}, {"org_id": "o", "api_secret": "s"}, True),
        ({"api_secret": Secret("s"), "urls": ("http://u",)}, {}, {}, False),
        ({"org_id": "o", "urls": ("http://u",)}, {}, {}, False),
        ({"org_id": "o", "api_secret": Secret("s")}, {}, {}, False),
    ],
)
def test_a_tick_folder_needs_an_org_a_secret_and_an_address(
    tmp_path: Path, folder: dict[str, Any], of_agent: dict[str, Any], of_ticks: dict[str, Any], works: bool
) -> None:
    """Its own, or those of the settings around it."""
    each = TickFolder(folder=tmp_path, project_id="shop", **folder)
    if works:
        assert "ticks-shop" == asyncio.run(open_courier(each, of_agent, of_ticks))
        return
    with pytest.raises(Invalid, match="lacks an org, a secret or an address"):
        asyncio.run(open_courier(each, of_agent, of_ticks))


class FolderUploads:
    """Stands where uploads of a folder are made: with what, by which clients, and which of these are open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clients: list[tuple[Any, ...]] = []
        self.open: list[str] = []
        self.made: dict[str, Any] = {}
        self.used: list[Any] = []
        monkeypatch.setattr("lakebed.ticks.uploader.client", self.client)
        monkeypatch.setattr("lakebed.ticks.uploader.Uploader", lambda http, runtime, **named: (http, named))
        monkeypatch.setattr("lakebed.ticks.folder_uploader.FolderUploader", self.uploader)

    @asynccontextmanager
    async def client(self, url: str, org_id: str, secret: Secret, ca_file: Path | None) -> AsyncIterator[str]:
        self.clients.append((url, org_id, secret.reveal(), ca_file))
        self.open.append(url)
        yield url
        self.open.remove(url)

    def uploader(self, folder: Path, outbox: Outbox, uploaders: Any, runtime: Any, **named: Any) -> Any:
        self.made = named | {"folder": folder, "outbox": outbox, "uploaders": uploaders}
        return SimpleNamespace(run=None, use=self.used.append)


def test_what_a_tick_folder_names_comes_before_what_is_named_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another org's folder is never sent with the key of the settings; every other choice of it is passed on too."""
    uploads = FolderUploads(monkeypatch)
    own = {"org_id": "mine", "api_secret": Secret("own"), "urls": ("http://a", "http://b")}
    chosen = {"keys": {"orders": ("id",)}, "mode": "full", "keep": True, "interval_s": 7.0}
    each = TickFolder(folder=tmp_path, project_id="shop", **own, **chosen)  # type: ignore[arg-type]
    around = {"collectors": ["http://c"], "queue_dir": str(tmp_path / "q"), "tls_ca": "/ca.pem", "ticks_parallel": 3}

    asyncio.run(open_courier(each, around, {"org_id": "theirs", "api_secret": "other"}))

    made = uploads.made
    assert [(url, "mine", "own", Path("/ca.pem")) for url in ("http://a", "http://b")] == uploads.clients
    assert chosen | {"project_id": "shop"} == {name: made[name] for name in (*chosen, "project_id")}
    assert (tmp_path, tmp_path / "q/ticks/mine~shop") == (made["folder"], made["outbox"].files("t").parent)
    limits = {"parallel": 3, "tries_max": ROUND_TRIES}
    assert [("http://a", limits), ("http://b", limits)] == made["uploaders"]
    assert [] == uploads.open


async def test_clients_of_addresses_that_are_no_longer_used_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the addresses change; those before the last stay open, since an upload may use them still."""
    uploads, heard = FolderUploads(monkeypatch), list[Any]()
    each = TickFolder(folder=tmp_path, project_id="shop", org_id="o", api_secret=Secret("s"), urls=("http://0",))
    snapshot: Any = SimpleNamespace(listen=heard.append)
    opened = agent_commands.folder_uploader(
        each, AgentSettings(), TicksSettings(), lambda kind, message: None, runtime_of(), snapshot
    )

    seen = []
    async with opened:
        for number in range(1, 4):
            await heard[0](SimpleNamespace(urls=(f"http://{number}",)))
            seen.append(list(uploads.open))

    assert [["http://0", "http://1"], ["http://1", "http://2"], ["http://2", "http://3"]] == seen
    assert [f"http://{number}" for number in range(1, 4)] == [made[0][0] for made in uploads.used]
    assert [] == uploads.open


@pytest.fixture
def outbox(shell: Shell, tmp_path: Path) -> Outbox:
    """The outbox of project shop of org acme, with a tick that waits and one that was refused."""
    (tmp_path / "lakebed.toml").write_text(
        f'[agent]\nqueue_dir = "{tmp_path}/q"\n[ticks]\norg_id = "acme"\n'
        '[[agent.ticks]]\nfolder = "drop"\nproject_id = "shop"\n'
    )
    made = Outbox(tmp_path / "q" / "ticks" / "acme~shop")
    made.put(OutboxTick(PackedTick("t-1", "shop", "", {0: "a", 1: "b"}), tries=2, folder="drop/t-1"))
    made.put(OutboxTick(PackedTick("t-2", "shop", "", {}), folder="drop/t-2").refused("bad", "will not do"))
    return made


def test_waiting_ticks_are_listed_with_what_is_wrong_with_them(shell: Shell, outbox: Outbox) -> None:
    """Every column of both states."""
    ready, refused = shell.data("agent", "ticks", "list")

    assert {
        "project_id": "shop", "tick_id": "t-1", "state": "ready", "parts": 2, "tries": 2, "part_attempts": {},
        "error_class": "", "message": "", "folder": "drop/t-1",
    } == ready  # fmt: skip
    assert ("t-2", "failed_manual", "bad", "will not do") == tuple(
        refused[name] for name in ("tick_id", "state", "error_class", "message")
    )


def test_a_folder_with_an_org_of_its_own_is_looked_up_under_it(shell: Shell, outbox: Outbox, tmp_path: Path) -> None:
    """The agent writes to the outbox of the folder's org; the list and a retry read the same one."""
    with (tmp_path / "lakebed.toml").open("a") as file:
        file.write('[[agent.ticks]]\nfolder = "drop2"\nproject_id = "shop"\norg_id = "rival"\n')
    theirs = Outbox(tmp_path / "q" / "ticks" / "rival~shop")
    theirs.put(OutboxTick(PackedTick("t-9", "shop", "", {}), folder="drop2/t-9").refused("bad", "no"))

    listed = [row["tick_id"] for row in shell.data("agent", "ticks", "list")]
    code, _, _ = shell("agent", "ticks", "retry", "t-9", "--reason", "mended")

    assert (["t-1", "t-2", "t-9"], exits.OK, False) == (listed, code, theirs.has("t-9"))


def test_only_a_refused_tick_is_packed_again(shell: Shell, outbox: Outbox) -> None:
    """One that waits is not found by retry; a dry run forgets nothing."""
    waiting, _, err = shell("agent", "ticks", "retry", "t-1", "--reason", "r")
    _, _, would = shell("agent", "ticks", "retry", "t-2", "--reason", "mended", "--dry-run")
    kept = outbox.has("t-2")
    _, _, will = shell("agent", "ticks", "retry", "t-2", "--reason", "mended")

    assert exits.code_for(NotFound("")) == waiting and "no rejected tick t-1" in err
    assert ("would pack drop/t-2 again: mended", "will pack drop/t-2 again: mended") == (would.strip(), will.strip())
    assert (True, False, True) == (kept, outbox.has("t-2"), outbox.has("t-1"))


@pytest.mark.parametrize(("urls", "tries"), [(("http://a",), ROUND_TRIES), (("http://a", "http://b"), ROUND_TRIES)])
def test_a_request_is_given_up_soon_for_the_next_tick_or_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, urls: tuple[str, ...], tries: int
) -> None:
    """Every address has an uploader, which sends as many parts at once as set."""
    made: list[Uploader] = []

    class Spied(Uploader):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            made.append(self)
            parallel.append(named["parallel"])

    parallel: list[int] = []
    monkeypatch.setattr("lakebed.ticks.uploader.Uploader", Spied)
    each = TickFolder(folder=tmp_path, project_id="shop", org_id="o", api_secret=Secret("s"), urls=urls)
    asyncio.run(open_courier(each, {"ticks_parallel": 7}, {}))

    assert ([tries] * len(urls), [7] * len(urls)) == ([one._tries_max for one in made], parallel)
    assert list(urls) == [str(one._http.base_url).rstrip("/") for one in made]
