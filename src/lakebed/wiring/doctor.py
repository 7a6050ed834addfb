"""`lakebed doctor`: checks this machine, then the store, then what each part needs."""

from __future__ import annotations

import asyncio
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say, show
from lakebed.cli.where import Where, in_loop
from lakebed.core.clock import now_ms
from lakebed.core.context import Context, Diagnosis
from lakebed.core.errors import LakebedError, NotFound, OutcomeUnknown
from lakebed.store import prover
from lakebed.store.connect import connect
from lakebed.store.guarded import unguarded
from lakebed.store.path_check import check_path
from lakebed.store.settings import StoreSettings
from lakebed.wiring.parts import diagnose, machine_checks

DISK_FAIL_BYTES = 1 * 1024**3
DISK_WARN_BYTES = 5 * 1024**3
SKEW_WARN_MS = 2_000
SKEW_FAIL_MS = 30_000
RACERS = 6
ROUNDS = 2
WRITE_S = 45.0  # for a write, a head and a delete, retries included: a slow store manages one of them in time
STUCK = "read the store's own log: it needs free space, and as many servers as it writes copies"


async def examine(
    context: Context, folder: Path, report: Callable[[Diagnosis], None], *, endpoints: Sequence[str] = ()
) -> list[Diagnosis]:
    """Runs every check and reports each verdict as it is known. `endpoints`: more S3 gateways of the same store."""
    found: list[Diagnosis] = []

    def add(*diagnoses: Diagnosis) -> None:
        for diagnosis in diagnoses:
            found.append(diagnosis)
            report(diagnosis)

    context = msgspec.structs.replace(context, store=unguarded(context.store))  # the path itself is examined
    add(*machine(folder))
    reachable = await clock_skew(context)
    add(reachable)
    if reachable.verdict != "fail":
        add(*[await store_path(context, endpoint) for endpoint in _endpoints(context, endpoints)])
        add(await store_proof(context, endpoints))
        add(*await diagnose(context))
    return found


def machine(folder: Path) -> list[Diagnosis]:
    """The checks that need no store."""
    return [python(), *machine_checks(), ports(), disk(folder)]


def python() -> Diagnosis:
    seen = f"Python {platform.python_version()} at {sys.executable}"
    if platform.python_implementation() != "CPython":
        return Diagnosis("python", "warn", seen, "Lakebed is tested on CPython only")
    return Diagnosis("python", "pass", seen)


def ports() -> Diagnosis:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return Diagnosis("ports", "pass", f"loopback ports can be opened (tried {probe.getsockname()[1]})")
    except OSError as error:
        return Diagnosis("ports", "fail", str(error), "allow this user to listen on 127.0.0.1")


def disk(folder: Path) -> Diagnosis:
    existing = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    free = shutil.disk_usage(existing).free
    seen = f"{free / 1024**3:.1f} GiB free at {existing}"
    fix = "free some space, or choose another folder with --dir"
    if free < DISK_FAIL_BYTES:
        return Diagnosis("disk", "fail", seen, fix)
    return Diagnosis("disk", "warn" if free < DISK_WARN_BYTES else "pass", seen, "" if free >= DISK_WARN_BYTES else fix)


async def clock_skew(context: Context, write_s: float = WRITE_S) -> Diagnosis:
    """Writes a scratch object and compares the store's time of it with ours."""
    key = f"{prover.SCRATCH}clock-{context.ids.token()}"
    try:
        async with asyncio.timeout(write_s):
            before = now_ms(context.clock)
            await context.store.create(key, context.ids.token().encode())
            stamped = (await context.store.head(key)).modified_ms
            after = now_ms(context.clock)
            await context.store.delete(key)
    except TimeoutError:
        return Diagnosis("store", "fail", f"no write completed within {write_s:.0f} s", STUCK)
    except LakebedError as error:
        fix = error.hint or "start one with `lakebed up`, or set store.url and store.endpoint to yours"
        fix = STUCK if isinstance(error, OutcomeUnknown) else fix  # a scratch object needs no reading back
        return Diagnosis("store", "fail", error.message, fix)
    skew = max(0, stamped - after, before - 1000 - stamped)  # the store's stamp is in whole seconds
    if skew >= SKEW_WARN_MS:
        verdict = "fail" if skew >= SKEW_FAIL_MS else "warn"
        return Diagnosis("clock", verdict, f"{skew / 1000:.1f} s from the store's clock", "run NTP on both sides")  # type: ignore[arg-type]
    return Diagnosis("clock", "pass", "agrees with the store's clock within its resolution of a second")


async def store_path(context: Context, endpoint: str) -> Diagnosis:
    """What every process checks at its start: no condition is ignored through this endpoint, with either client."""
    name = f"store path {endpoint}".rstrip()
    settings = msgspec.structs.replace(context.settings.of(StoreSettings), endpoint=endpoint)
    store = connect(settings, context)
    try:
        prover.demand(await check_path(store, context))
    except LakebedError as error:
        return Diagnosis(name, "fail", error.message, error.hint)
    return Diagnosis(name, "pass", "refuses a second create and a stale replace, with small and with large bodies")


async def store_proof(context: Context, endpoints: Sequence[str] = ()) -> Diagnosis:
    """Races clients through the store's endpoint and the others given, in one race: endpoints may disagree on who was
    first.
    """
    settings = context.settings.of(StoreSettings)
    through = _endpoints(context, endpoints)
    racers = [
        connect(msgspec.structs.replace(settings, endpoint=through[number % len(through)]), context)
        for number in range(max(RACERS, len(through)))
    ]
    try:
        prover.demand(await prover.prove(racers, context, rounds=ROUNDS))
    except LakebedError as error:
        return Diagnosis("store prover", "fail", error.message, error.hint)
    by = f" through {len(through)} endpoints" if endpoints else ""
    seen = f"{len(racers)} clients{by}, {ROUNDS} rounds: one winner in every race of creates and of replaces"
    return Diagnosis("store prover", "pass", seen)


def _endpoints(context: Context, endpoints: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([context.settings.of(StoreSettings).endpoint, *endpoints]))


MARKS = {"pass": "✓", "warn": "!", "fail": "✗"}


def doctor(
    *,
    endpoint: Annotated[
        tuple[str, ...], Parameter(help="another S3 gateway of the same store, to race through too (may be repeated)")
    ] = (),
    where: Where = Where(),
    output: Output = "table",
) -> int:
    """Check this machine and the store: pass, warn or fail, with one line each on how to fix it."""
    report = _line if output == "table" else _silent
    try:
        context = where.context("doctor")
    except NotFound as error:  # no stack and no store: this machine can still be checked
        found = [*machine(where.folder), Diagnosis("store", "fail", error.message, error.hint)]
        for diagnosis in found:
            report(diagnosis)
    else:
        found = in_loop(lambda: examine(context, where.folder, report, endpoints=endpoint))
    if output != "table":
        emit(found, output)
    failed = sum(diagnosis.verdict == "fail" for diagnosis in found)
    if output == "table":
        say(f"{failed} failed" if failed else "all good" if all(d.verdict == "pass" for d in found) else "usable")
    return exits.FAILED if failed else exits.OK


def _line(diagnosis: Diagnosis) -> None:
    show(f"{MARKS[diagnosis.verdict]} {diagnosis.name:<23} {diagnosis.seen}", flush=True)
    if diagnosis.fix:
        show(f"  fix: {diagnosis.fix}", flush=True)


def _silent(diagnosis: Diagnosis) -> None:
    return None
