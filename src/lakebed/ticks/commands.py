"""`lakebed ticks`: upload Parquet files as ticks, show their status, and create the projects' secrets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, as_operator, in_loop
from lakebed.core.clock import SystemClock
from lakebed.core.errors import Invalid
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.core.settings import Secret
from lakebed.ticks.settings import TicksSettings

app = App(name="ticks", help="Ticks: upload Parquet files, show their status.")

Project = Annotated[str, Parameter(name=["--project", "-p"], help="the project")]
Org = Annotated[str, Parameter(help="the org (default: ticks.org_id)")]
Url = Annotated[str, Parameter(help="address of a gateway (default: the running stack's)")]
DryRun = Annotated[bool, Parameter(help="only show what would happen", negative="")]


@app.command
def push(
    *paths: Path,
    project: Project,
    org: Org = "",
    key: Annotated[tuple[str, ...], Parameter(help="primary key: COLUMN, or TABLE=COLUMN,COLUMN")] = (),
    mode: Annotated[str, Parameter(help="delta (upsert by key) or full (replace)")] = "delta",
    tick: Annotated[str, Parameter(help="the tick's id (default: the time and a random suffix)")] = "",
    url: Url = "",
    dry_run: DryRun = False,
    where: Where = Where(),
    output: Output = "table",
) -> int:
    """Upload Parquet files as one tick and wait until it is committed.

    Files called TABLE_seq=NNN.parquet are pages of one table. A folder with a _manifest.json is sent as that describes.
    A tick waits on disk until it is committed: `lakebed ticks resume` continues after an interruption.

    Parameters
    ----------
    paths
        files, or folders of files.
    """
    from lakebed.ticks import packing
    from lakebed.ticks.outbox import OutboxTick

    if not paths:
        raise Invalid("no files were given", hint="give files or a folder")
    now = datetime.fromtimestamp(SystemClock().now_ns() / 1e9, UTC)
    if len(paths) == 1 and (paths[0] / packing.MANIFEST_FILE).is_file():
        packed = packing.pack_from_manifest(paths[0], project_id=project)
    else:
        packed = packing.pack(
            packing.find(paths),
            project_id=project,
            tick_id=tick or f"{now:%Y%m%dT%H%M%S}__{Ids().token()[:8]}",
            dt=f"{now:%Y%m%d}",
            keys=_keys(key),
            mode=mode,
        )
    if dry_run:
        emit(msgspec.json.decode(packed.manifest), "json" if output == "table" else output)
        return exits.OK
    _secret(where)  # checked first: a push that cannot be sent leaves nothing on disk
    outbox = _outbox(where)
    outbox.put(OutboxTick(packed))
    return _drain(where, org, url, output, sum(map(_size, packed.files.values())))


@app.command
def resume(*, org: Org = "", url: Url = "", where: Where = Where(), output: Output = "table") -> int:
    """Send the ticks that were pushed and are not committed yet."""
    waiting = [each for each in _outbox(where).waiting() if each.state == "ready"]
    if not waiting:
        say("no tick waits")
        return exits.OK
    return _drain(where, org, url, output, sum(_size(file) for each in waiting for file in each.packed.files.values()))


@app.command
def outbox(*, where: Where = Where(), output: Output = "table") -> None:
    """Show the ticks that wait on disk, and those that were refused."""
    rows = [
        {
            "tick_id": each.packed.tick_id,
            "project_id": each.packed.project_id,
            "state": each.state,
            "parts": len(each.packed.files),
            "tries": each.tries,
            "error_class": each.error_class,
            "message": each.message,
        }
        for each in _outbox(where).waiting()
    ]
    emit(rows, output)


@app.command
def discard(
    tick: Annotated[str, Parameter(help="the tick's id")],
    *,
    reason: Annotated[str, Parameter(help="why")],
    dry_run: DryRun = False,
    where: Where = Where(),
) -> None:
    """Remove a tick from the outbox. Its files stay."""
    if not any(each.packed.tick_id == tick for each in _outbox(where).waiting()):
        raise Invalid(f"no tick {tick} waits", hint="lakebed ticks outbox")
    if not dry_run:
        _outbox(where).remove(tick)
    say(f"{'would remove' if dry_run else 'removed'} {tick}: {reason}")


@app.command
def status(*, project: Project, org: Org = "", where: Where = Where(), output: Output = "table") -> None:
    """Show the latest ticks of a project."""
    from lakebed.ticks.view import project_status

    context = where.context("cli")
    found = in_loop(lambda: project_status(context, _org(where, org), project))
    if output == "table":
        say(f"{found.org_id}/{found.project_id}: {found.states or 'no ticks'}; owner: {found.owner or 'none'}")
        emit(list(found.ticks), output)
    else:
        emit(found, output)


@app.command(name="list")
def list_projects(
    *,
    project: Annotated[str, Parameter(name=["--project", "-p"], help="only this project")] = "",
    org: Annotated[str, Parameter(help="only this org")] = "",
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show every project with its latest ticks."""
    from lakebed.ticks.view import project_statuses

    context = where.context("cli")
    found = in_loop(lambda: project_statuses(context, org, project))
    rows = [
        {"org": one.org_id, "project": one.project_id, **msgspec.to_builtins(t)} for one in found for t in one.ticks
    ]
    emit(rows if output == "table" else found, output)


app.command(list_projects, name="ls", show=False)  # the former name


@app.command
def show(
    tick: Annotated[str, Parameter(help="the tick's id")],
    /,
    *,
    project: Project,
    org: Org = "",
    where: Where = Where(),
    output: Output = "yaml",
) -> None:
    """Show a tick's stages from its parts to gold."""
    from lakebed.ticks.paths import tick_id
    from lakebed.ticks.view import view

    context = where.context("cli")
    emit(in_loop(lambda: view(context, tick_id(_org(where, org), project, tick))), output)


@app.command
def dump(key: str, /, *, where: Where = Where(), output: Output = "json") -> None:
    """Decode one stored object of ticks: a state, a commit record, a queue shard, an audit row.

    Parameters
    ----------
    key
        its key in the bucket; secrets stay encrypted.
    """
    context = where.context("cli")

    async def fetch() -> Any:
        return msgspec.json.decode((await context.store.get(key)).data)

    emit(in_loop(fetch), output)


@app.command
def secret(
    *, project: Project, org: Org = "", dry_run: DryRun = False, where: Where = Where(), output: Output = "table"
) -> None:
    """Create a new secret for a project and show it once. The old secret stops working within 30 s."""
    from lakebed.ticks.adapters import open_vault

    context, whose = where.context("cli"), _org(where, org)
    if dry_run:
        say(f"would create a new secret for {whose}/{project}")
        return

    async def work() -> str:
        async with as_operator(context, "ticks.secret", {"org": whose, "project": project}):
            return await open_vault(context).issue(whose, project)

    made = in_loop(work)
    emit({"org_id": whose, "project_id": project, "api_secret": made}, output)


@app.command
def key() -> None:
    """Create a key for ticks.payload_key. To rotate keys, put it before the old ones, separated by a comma."""
    from cryptography.fernet import Fernet

    print(Fernet.generate_key().decode())


def _drain(where: Where, org: str, url: str, output: str, total_bytes: int) -> int:
    from lakebed.ticks.uploader import Uploader, client

    secret = _secret(where)
    outbox, address = _outbox(where), url or _gateway(where)

    runtime = Runtime(clock=SystemClock(), ids=Ids(), metrics=Metrics())

    async def work() -> Any:
        with _bar(total_bytes) as sent:
            async with client(address, _org(where, org), secret) as http:
                uploader = Uploader(http, runtime, sent=sent)
                return await uploader.drain(outbox)

    done = in_loop(work)
    if done:
        emit(list(done.values()), output)
    failed = [each for each in outbox.waiting() if each.state == "failed_manual"]
    for each in failed:
        say(f"{each.packed.tick_id} was refused ({each.error_class}): {each.message}")
    return exits.FAILED if failed else exits.OK


def _secret(where: Where) -> Secret:
    found = where.settings().of(TicksSettings).api_secret
    if not found:
        raise Invalid(
            "no secret is set",
            hint="lakebed ticks secret --project P creates one; set it as LAKEBED_TICKS_API_SECRET",
        )
    return found


@contextmanager
def _bar(total_bytes: int) -> Iterator[Any]:
    """A progress bar on stderr, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("uploading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("parts", total=total_bytes)
        yield lambda size_bytes: progress.advance(task, size_bytes)


def _keys(given: tuple[str, ...]) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    for text in given:
        table, _, columns = text.rpartition("=")
        keys.setdefault(table, []).extend(columns.split(","))
    return keys


def _org(where: Where, org: str) -> str:
    found = org or where.settings().of(TicksSettings).org_id
    if not found:
        raise Invalid("no org is set", hint="--org, or LAKEBED_TICKS_ORG_ID")
    return found


def _outbox(where: Where) -> Any:
    from lakebed.ticks.outbox import Outbox

    return Outbox(where.folder / "ticks-outbox")


def _gateway(where: Where) -> str:
    from lakebed.embedded.endpoints import find

    found = find(where.folder).gateway
    if not found:
        raise Invalid("no gateway runs in this folder", hint="lakebed up, or --url")
    return found


def _size(file: str) -> int:
    return Path(file).stat().st_size if Path(file).is_file() else 0
