"""`lakebed ticks`: upload files as ticks, show their status, and create the projects' secrets."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import App, Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, byte_bar, emit, say, size_text
from lakebed.cli.where import Where, as_operator, in_loop
from lakebed.core.clock import SystemClock
from lakebed.core.errors import Conflict, Denied, Invalid, LakebedError, NotFound
from lakebed.core.ids import Ids
from lakebed.core.runtime import system_runtime
from lakebed.core.settings import Secret
from lakebed.gateway.settings import GatewaySettings
from lakebed.ticks.model import DEFAULT_ORG, DEFAULT_PROJECT
from lakebed.ticks.settings import TicksSettings

if TYPE_CHECKING:
    from lakebed.ticks.model import FinalizeResult
    from lakebed.ticks.outbox import Outbox, OutboxTick
    from lakebed.ticks.packing import PackedTick

app = App(name="ticks", help="Ticks: upload files as tables, show their status.")

Project = Annotated[str, Parameter(name=["--project", "-p"], help="the project")]
Org = Annotated[str, Parameter(help="the org (default: ticks.org_id)")]
Url = Annotated[str, Parameter(help="address of a gateway (default: the running stack's)")]
DryRun = Annotated[bool, Parameter(help="only show what would happen", negative="")]


@app.command
def push(
    *paths: Path,
    project: Annotated[str, Parameter(name=["--project", "-p"], help="the project")] = DEFAULT_PROJECT,
    org: Org = "",
    key: Annotated[tuple[str, ...], Parameter(help="primary key: COLUMN, or TABLE=COLUMN,COLUMN")] = (),
    mode: Annotated[
        Literal["delta", "full", ""],
        Parameter(help="delta (upsert by key) or full (replace); default: delta with a key, full without one"),
    ] = "",
    tick: Annotated[str, Parameter(help="the tick's id (default: the time and a random suffix)")] = "",
    url: Url = "",
    dry_run: DryRun = False,
    where: Where = Where(),
    output: Output = "table",
) -> int:
    """Upload files as one tick and wait until it is committed.

    For example: lakebed ticks push orders.csv --key id. Parquet, CSV, JSON and JSON Lines are accepted. Each file is
    a table; TABLE_seq=NNN.parquet are pages of one. A folder with a _manifest.json is sent as that describes. On a
    stack of `lakebed up` nothing else is needed: its organisation is "local", and the project's secret is made at its
    first push. A push that is interrupted waits on disk for `lakebed ticks resume`; one that is refused does not.

    Parameters
    ----------
    paths
        files, or folders of files.
    """
    from lakebed.ticks.outbox import OutboxTick

    if not paths:
        raise Invalid("no files were given", hint="give files or a folder")
    tick, outbox = tick or _tick_id(), outbox_in(where)
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="lakebed-tick-") as made:
            packed = _pack(paths, Path(made), project, tick, key, mode)
        emit(msgspec.json.decode(packed.manifest), "json" if output == "table" else output)
        return exits.OK
    try:  # a push that cannot be sent leaves nothing on disk
        packed = _pack(paths, outbox.files(tick), project, tick, key, mode)
        target = target_of(where, _org(where, org, url), project, url)
    except LakebedError:
        outbox.remove(tick)
        raise
    outbox.put(OutboxTick(packed))
    done = send(outbox, packed.tick_id, target)
    if done is not None:
        emit([done], output)
    return exits.FAILED if done is None else exits.OK


def _tick_id() -> str:
    now = datetime.fromtimestamp(SystemClock().now_ns() / 1e9, UTC)
    return f"{now:%Y%m%dT%H%M%S}__{Ids().token()[:8]}"


def _pack(paths: Sequence[Path], made: Path, project: str, tick: str, key: tuple[str, ...], mode: str) -> PackedTick:
    """The tick of these files; what is not Parquet is converted into the folder `made`."""
    from lakebed.ticks import packing

    if len(paths) == 1 and (paths[0] / packing.MANIFEST_FILE).is_file():
        return packing.pack_from_manifest(paths[0], project_id=project)
    files = [packing.as_parquet(file, made) for file in packing.find(paths, packing.ENDINGS)]
    day = tick[:8] if tick[:8].isdecimal() else f"{datetime.fromtimestamp(SystemClock().now_ns() / 1e9, UTC):%Y%m%d}"
    return packing.pack(files, project_id=project, tick_id=tick, dt=day, keys=_keys(key), mode=mode)


@app.command
def resume(*, org: Org = "", url: Url = "", where: Where = Where(), output: Output = "table") -> int:
    """Send the ticks that were pushed and are not committed yet."""
    waiting = [each for each in outbox_in(where).waiting() if each.state == "ready"]
    if not waiting:
        say("no tick waits")
        return exits.OK
    whose = _org(where, org, url)
    sent = [
        send(outbox_in(where), tick.tick_id, target_of(where, whose, tick.project_id, url), waited=True)
        for tick in (each.packed for each in waiting)
    ]
    if any(sent):
        emit([done for done in sent if done is not None], output)
    return exits.OK if all(sent) else exits.FAILED


@app.command
def outbox(*, where: Where = Where(), output: Output = "table") -> None:
    """Show the ticks that wait on disk, and those that were refused."""
    box = outbox_in(where)
    rows = [
        {
            "tick_id": each.packed.tick_id,
            "project_id": each.packed.project_id,
            "state": each.state,
            "parts": len(each.packed.files),
            "tries": each.tries,
            "part_attempts": dict(sorted(box.attempts(each.packed.tick_id).items())),
            "error_class": each.error_class,
            "message": each.message,
        }
        for each in box.waiting()
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
    if not any(each.packed.tick_id == tick for each in outbox_in(where).waiting()):
        raise Invalid(f"no tick {tick} waits", hint="lakebed ticks outbox")
    if not dry_run:
        outbox_in(where).remove(tick)
    say(f"{'would remove' if dry_run else 'removed'} {tick}: {reason}")


@app.command
def status(*, project: Project, org: Org = "", where: Where = Where(), output: Output = "table") -> None:
    """Show the latest ticks of a project."""
    from lakebed.ticks.view import project_status

    context = where.context("cli")
    found = in_loop(lambda: project_status(context, _org(where, org), project))
    if output == "table":
        states = ", ".join(f"{count} {state}" for state, count in found.states.items())
        say(f"{found.org_id}/{found.project_id}: {states or 'no ticks'}; owner: {found.owner or 'none'}")
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
    *,
    project: Project,
    org: Org = "",
    keep_former: Annotated[float, Parameter(help="seconds in which the old secret still works")] = 0.0,
    dry_run: DryRun = False,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Create or rotate the secret of a project and show it once. The old one ends within 30 s, or --keep-former."""
    from lakebed.ticks.adapters import open_vault

    context, whose = where.context("cli"), _org(where, org)
    if dry_run:
        say(f"would create a new secret for {whose}/{project}")
        return

    async def work() -> str:
        async with as_operator(context, "ticks.secret", {"org": whose, "project": project}):
            return await open_vault(context).issue(whose, project, keep_former_s=keep_former)

    made = in_loop(work)
    emit({"org_id": whose, "project_id": project, "api_secret": made}, output)


@app.command
def key() -> None:
    """Create a key for ticks.payload_key. To rotate keys, put it before the old ones, separated by a comma."""
    import base64

    print(base64.urlsafe_b64encode(bytes.fromhex(Ids().secret() + Ids().secret())[:32]).decode())


# A gateway's address, the org, the project's secret and the authorities that the gateway is verified with.
Target = tuple[str, str, Secret, Path | None]


def target_of(where: Where, org: str, project: str, url: str) -> Target:
    """Raises Invalid when there is no gateway or no secret: checked before anything is left on disk."""
    secret = _secret(where, org, project, url)
    return url or _gateway(where), org, secret, where.settings().of(GatewaySettings).tls_ca


def send(outbox: Outbox, tick: str, target: Target, *, waited: bool = False) -> FinalizeResult | None:
    """Sends one tick of the outbox; None when its content was refused, which `lakebed ticks outbox` then shows.

    A refused request is raised and the tick is forgotten: it is not sent later. One that did not get through waits, and
    a tick that waited goes on waiting when the key or secret of its resume is wrong.
    """
    from lakebed.ticks.uploader import Uploader, client

    runtime = system_runtime()
    (waiting,) = [each for each in outbox.waiting() if each.packed.tick_id == tick]
    total_bytes = sum(map(_size, waiting.packed.files.values()))
    started_s = runtime.clock.monotonic_s()

    async def work() -> FinalizeResult | None:
        with byte_bar(total_bytes) as sent:
            async with client(*target) as http:
                return await Uploader(http, runtime, sent=sent).deliver(outbox, waiting)

    try:
        done = in_loop(work)
    except (Denied, Invalid, NotFound, Conflict) as error:
        if not (waited and isinstance(error, Denied)):
            outbox.remove(tick)
        raise
    if done is None:
        refused = next(each for each in outbox.waiting() if each.packed.tick_id == tick)
        say(f"{tick} was refused ({refused.error_class}): {refused.message}")
        return None
    outbox.remove(tick)
    tables = ", ".join(f"{table['name']} ({table['mode']})" for table in _tables(waiting))
    seconds = runtime.clock.monotonic_s() - started_s
    say(f"{waiting.packed.project_id}: {tables}; {size_text(total_bytes)} in {seconds:.1f} s")
    return done


def _tables(waiting: OutboxTick) -> list[dict[str, Any]]:
    return list(msgspec.json.decode(waiting.packed.manifest)["tables"])


def _secret(where: Where, org: str, project: str, url: str) -> Secret:
    """That of the settings; on a stack of this machine, the project's own, which is made where there is none."""
    if found := where.settings().of(TicksSettings).api_secret:
        return found
    if url or not _on_stack(where):
        raise Invalid(
            "no secret is set",
            hint="lakebed ticks secret --project P creates one; set it as LAKEBED_TICKS_API_SECRET",
        )
    from lakebed.ticks.adapters import open_vault
    from lakebed.ticks.local_secret import local_secret

    context = where.context("cli")
    return Secret(in_loop(lambda: local_secret(open_vault(context), where.folder, org, project)))


def _on_stack(where: Where) -> bool:
    from lakebed.embedded.endpoints import is_held

    return is_held(where.folder)


def _keys(given: tuple[str, ...]) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    for text in given:
        table, _, columns = text.rpartition("=")
        keys.setdefault(table, []).extend(columns.split(","))
    return keys


def _org(where: Where, org: str, url: str = "") -> str:
    found = org or where.settings().of(TicksSettings).org_id
    if not found and not url and _on_stack(where):
        return DEFAULT_ORG
    if not found:
        raise Invalid("no org is set", hint="--org, or LAKEBED_TICKS_ORG_ID")
    return found


def outbox_in(where: Where) -> Outbox:
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
