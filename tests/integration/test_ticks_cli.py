"""`lakebed ticks` and `lakebed silver` as people type them, against a real gateway on the real bucket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lakebed.core.settings import env_name
from lakebed.store.settings import StoreSettings
from support import terminal
from support.process_output import next_line
from support.tick_fixtures import ORG, PAYLOAD_KEY, PROJECT, parquet

DEADLINE_S = 200.0
SETTINGS = {
    "ticks.payload_key": PAYLOAD_KEY, "ticks.pipeline": "twin", "ticks.org_id": ORG, "gateway.prove": "never",
    "ticks.batch_window_s": 0.2, "ticks.poll_s": 0.1,
}  # fmt: skip

CRASH_POINTS = Path(__file__).parents[1] / "support/ticks_crash_points.py"


class Shell:
    def __init__(self, folder: Path, settings: StoreSettings) -> None:
        self.folder = folder
        layer = {**settings.as_layer(), **SETTINGS}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LAKEBED_")}
        self.env = {**clean, **{env_name(key): str(value) for key, value in layer.items()}}
        self.env["PYTHONPATH"] = os.pathsep.join(sys.path)
        self._servers: list[asyncio.subprocess.Process] = []

    async def run(self, *arguments: str, code: int = 0, dies_at: str = "") -> Any:
        """The command's data on stdout; fails unless it ends with the code."""
        program = [str(CRASH_POINTS)] if dies_at else ["-m", "lakebed"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *program, *arguments, "-o", "json", env={**self.env, "DIES_AT": dies_at},
            cwd=self.folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, errors = await asyncio.wait_for(process.communicate(), DEADLINE_S)
        assert code == process.returncode, errors.decode()[-2000:]
        return json.loads(out) if out.strip() else None

    async def serve(self, command: str) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "lakebed", command, "--parts", "ticks,silver",
            env=self.env, cwd=self.folder, stdout=asyncio.subprocess.PIPE, stderr=(self.folder / "log").open("ab"),
        )  # fmt: skip
        self._servers.append(process)
        url: str = json.loads(await next_line(process, self.folder / "log"))["url"]
        return url

    async def agent(self, url: str, *, dies_at: str = "") -> asyncio.subprocess.Process:
        """A real agent that uploads the folder `drop` as ticks."""
        folder = {"folder": "drop", "project_id": PROJECT, "keys": {"": ["id"]}, "urls": [url], "interval_s": 0.1}
        env = {**self.env, "LAKEBED_AGENT_TICKS": json.dumps([folder]), "DIES_AT": dies_at}
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(CRASH_POINTS), "agent", "run", "--agent-id", "a",
            env=env, cwd=self.folder, stdout=asyncio.subprocess.DEVNULL, stderr=(self.folder / "log").open("ab"),
        )  # fmt: skip
        self._servers.append(process)
        return process

    async def clear(self) -> None:
        for process in self._servers:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def show(self, *arguments: str, person: bool) -> terminal.Shown:
        """The same in front of a person, or of nobody."""
        argv = [sys.executable, "-m", "lakebed", *arguments]
        return await asyncio.to_thread(terminal.run, argv, env=self.env, cwd=self.folder, terminal=person)


@pytest.fixture
async def shell(tmp_path: Path, bucket_settings: StoreSettings) -> AsyncIterator[Shell]:
    made = Shell(tmp_path, bucket_settings)
    yield made
    await made.clear()


async def test_a_person_pushes_files_and_follows_them_to_silver(shell: Shell) -> None:
    """secret, push, status, audit, dispatch, replay: one way through, each command's answer as data."""
    data = shell.folder / "data"
    data.mkdir()
    for seq in (1, 2):
        (data / f"orders_seq={seq:03d}.parquet").write_bytes(parquet([seq * 10, seq * 10 + 1]))
    url = await shell.serve("serve")
    shell.env["LAKEBED_TICKS_API_SECRET"] = (await shell.run("ticks", "secret", "--project", PROJECT))["api_secret"]

    push = ("ticks", "push", "data", "--project", PROJECT, "--key", "id", "--url", url)
    planned = await shell.run(*push, "--dry-run")
    (pushed,) = await shell.run(*push)
    status = await shell.run("ticks", "status", "--project", PROJECT)
    behind = await shell.run("silver", "audit", "--older-than-s", "0", code=1)
    await shell.serve("work")
    async with asyncio.timeout(DEADLINE_S):
        while (reported := await shell.run("silver", "status"))["undispatched"]:
            await asyncio.sleep(0.1)
    shown = await shell.run("silver", "show", "--tick", pushed["tick_id"])
    replayed = await shell.run("silver", "replay", "--tick", pushed["tick_id"], "--reason", "to see it")

    assert ("orders", 4) == (planned["tables"][0]["name"], planned["tables"][0]["row_count"])
    assert ("committed", 4, 0) == (pushed["status"], pushed["rows_inserted"], pushed["rows_replaced"])
    assert {"committed": 1} == status["states"]
    assert [pushed["tick_id"]] == [row["tick_id"] for row in behind]
    assert (0, "done") == (reported["dead"], shown["silver_dispatched"]["state"])
    assert (ORG, pushed["tick_id"]) == (replayed["org_id"], replayed["tick_id"])


@pytest.mark.parametrize("step", ["after_sending_a_part", "after_sending_all_parts"])
@pytest.mark.full
async def test_an_agent_killed_in_its_upload_goes_on_where_it_was(shell: Shell, step: str) -> None:
    """kill -9 in the middle of the parts, or before the finalize: `resume` sends the rest, and it is committed once."""
    for seq in (1, 2, 3):
        (shell.folder / f"orders_seq={seq:03d}.parquet").write_bytes(parquet([seq * 10, seq * 10 + 1]))
    url = await shell.serve("serve")
    shell.env["LAKEBED_TICKS_API_SECRET"] = (await shell.run("ticks", "secret", "--project", PROJECT))["api_secret"]
    push = ("ticks", "push", ".", "--project", PROJECT, "--key", "id", "--url", url)

    await shell.run(*push, code=-signal.SIGKILL, dies_at=step)
    uploaded = await shell.run("ticks", "status", "--project", PROJECT)
    (resumed,) = await shell.run("ticks", "resume", "--url", url)

    assert ({"uploading": 1}, 6) == (uploaded["states"], resumed["rows_inserted"])
    assert [] == await shell.run("ticks", "outbox")


@pytest.mark.parametrize(
    "step",
    [
        pytest.param("after_sending_a_part", marks=pytest.mark.full),
        pytest.param("after_sending_all_parts", marks=pytest.mark.full),
        "after_delivering",
    ],
)
async def test_a_killed_agent_uploads_its_folders_once(shell: Shell, step: str) -> None:
    """kill -9 in the parts, before the finalize, and after the commit: the next run of the agent does the rest."""
    drop = shell.folder / "drop"
    for tick in ("t-1", "t-2"):
        (drop / tick).mkdir(parents=True)
        for seq in (1, 2, 3):
            (drop / tick / f"orders_seq={seq:03d}.parquet").write_bytes(parquet([seq * 10, seq * 10 + 1], tick))
        (drop / tick / "_ready").touch()
    url = await shell.serve("serve")
    shell.env["LAKEBED_TICKS_API_SECRET"] = (await shell.run("ticks", "secret", "--project", PROJECT))["api_secret"]

    killed = await asyncio.wait_for((await shell.agent(url, dies_at=step)).wait(), DEADLINE_S)
    left = sorted(each.name for each in drop.iterdir())
    successor = await shell.agent(url)
    async with asyncio.timeout(DEADLINE_S):
        while any(not each.name.startswith(".") for each in drop.iterdir()):
            assert successor.returncode is None, (shell.folder / "log").read_text()[-2000:]
            await asyncio.sleep(0.1)
    successor.send_signal(signal.SIGTERM)
    stopped = await asyncio.wait_for(successor.wait(), DEADLINE_S)
    status = await shell.run("ticks", "status", "--project", PROJECT)

    assert (-signal.SIGKILL, ["t-1", "t-2"], 0) == (killed, left, stopped)
    assert {"committed": 2} == status["states"]
    rows = {each["tick_id"]: (each["rows_inserted"], each["rows_replaced"]) for each in status["ticks"]}
    assert {"t-1": (6, 0), "t-2": (0, 6)} == rows


@pytest.mark.full
async def test_what_is_refused_stays_in_the_outbox_with_its_reason(shell: Shell) -> None:
    """A tick that can never be committed ends with 1 and waits for a person; discarding it needs a reason."""
    (shell.folder / "orders.parquet").write_bytes(parquet([1]))
    url = await shell.serve("serve")
    shell.env["LAKEBED_TICKS_API_SECRET"] = (await shell.run("ticks", "secret", "--project", PROJECT))["api_secret"]
    push = ("ticks", "push", "orders.parquet", "--project", PROJECT, "--key", "id", "--url", url, "--tick", "t1")
    await shell.run(*push)
    folder = shell.folder / "own"
    folder.mkdir()
    (folder / "orders.parquet").write_bytes(parquet([1]))
    output = await shell.run(*push[:-1], "t2", "--dry-run")
    output["tables"][0]["row_count"] = output["tables"][0]["parquets"][0]["rows"] = 2
    (folder / "_manifest.json").write_text(json.dumps(output))

    await shell.run("ticks", "push", "own", "--project", PROJECT, "--url", url, code=1)
    (left,) = await shell.run("ticks", "outbox")

    assert ("t2", "failed_manual", "row_count_mismatch") == (left["tick_id"], left["state"], left["error_class"])


@pytest.mark.parametrize("person", [True, False])
@pytest.mark.full
async def test_a_push_shows_its_bar_to_a_person_and_to_nobody_else(shell: Shell, person: bool) -> None:
    """Bytes sent of bytes to send, drawn on a terminal; in a pipe no control character, and the same data."""
    secret = (await shell.run("ticks", "secret", "--project", PROJECT))["api_secret"]
    shell.env["LAKEBED_TICKS_API_SECRET"] = secret
    url = await shell.serve("serve")
    (shell.folder / "orders.parquet").write_bytes(parquet(range(20_000)))
    size = (shell.folder / "orders.parquet").stat().st_size

    words = ("ticks", "push", "orders.parquet", "--project", PROJECT, "--key", "id", "--url", url, "-o", "json")
    shown = await shell.show(*words, person=person)

    assert 0 == shown.code, shown.err
    (tick,) = json.loads(shown.out)
    assert ("committed", 20_000) == (tick["status"], tick["rows_inserted"])
    if person:
        assert b"uploading" in shown.err and b"\x1b[" in shown.err
        assert f"{size / 1000:.1f}/{size / 1000:.1f} kB".encode() in shown.err, "all of it was counted"
    else:
        assert b"uploading" not in shown.err
        assert not set(shown.err) & {0x1B, 0x0D, 0x08}


async def test_a_push_without_a_secret_leaves_nothing_behind(shell: Shell) -> None:
    """It says what is missing and how to get it, and the next push does not find a tick that nobody meant any more."""
    (shell.folder / "orders.parquet").write_bytes(parquet([1]))

    refused = await shell.show("ticks", "push", "orders.parquet", "--project", PROJECT, "--key", "id", person=False)

    assert refused.code != 0
    assert b"lakebed ticks secret" in refused.err and b"LAKEBED_TICKS_API_SECRET" in refused.err
    assert [] == await shell.run("ticks", "outbox")
