"""What `lakebed doctor` looks at: this machine first, then the store, then what each part says of its own ground."""

from __future__ import annotations

import asyncio
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from lakebed.clock import now_ms
from lakebed.context import Context, Diagnosis
from lakebed.errors import LakebedError
from lakebed.parts import diagnose
from lakebed.store import prover
from lakebed.store.connect import connect
from lakebed.store.guarded import unguarded
from lakebed.store.path_check import check_path
from lakebed.store.settings import StoreSettings

DISK_FAIL_BYTES = 1 * 1024**3
DISK_WARN_BYTES = 5 * 1024**3
SKEW_WARN_MS = 2_000
SKEW_FAIL_MS = 30_000
RACERS = 6
ROUNDS = 2
WRITE_S = 45.0  # a write, a look and a delete, retries included: a store that is only slow is through in one of them
STUCK = "see the store's own log: has it room, and as many servers up as it writes copies?"


async def examine(
    context: Context, folder: Path, tell: Callable[[Diagnosis], None], *, endpoints: Sequence[str] = ()
) -> list[Diagnosis]:
    """Runs every check, telling each verdict as it falls. `endpoints`: more gateways of the same store, raced too."""
    found: list[Diagnosis] = []

    def add(*diagnoses: Diagnosis) -> None:
        for diagnosis in diagnoses:
            found.append(diagnosis)
            tell(diagnosis)

    context = msgspec.structs.replace(context, store=unguarded(context.store))  # the path itself is examined
    add(*machine(folder))
    reachable = await clock_skew(context)
    add(reachable)
    if reachable.verdict != "fail":
        add(*[await store_path(context, endpoint) for endpoint in _doors(context, endpoints)])
        add(await store_proof(context, endpoints))
        add(*await diagnose(context))
    return found


def machine(folder: Path) -> list[Diagnosis]:
    """What can be looked at without a store."""
    return [python(), java(), ports(), disk(folder)]


def python() -> Diagnosis:
    seen = f"Python {platform.python_version()} at {sys.executable}"
    if platform.python_implementation() != "CPython":
        return Diagnosis("python", "warn", seen, "Lakebed is tested on CPython only")
    return Diagnosis("python", "pass", seen)


def java() -> Diagnosis:
    from lakebed.pipeline.java import find_java

    try:
        return Diagnosis("java", "pass", find_java().about)
    except LakebedError as error:
        return Diagnosis("java", "fail", error.message, error.hint)


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
    fix = "free some space, or choose another place with --dir"
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
        return Diagnosis("store", "fail", f"took no write within {write_s:.0f} s", STUCK)
    except LakebedError as error:
        fix = error.hint or "start one with `lakebed up`, or point store.url and store.endpoint at yours"
        return Diagnosis("store", "fail", error.message, fix)
    skew = max(0, stamped - after, before - 1000 - stamped)  # the store's stamp is in whole seconds
    if skew >= SKEW_WARN_MS:
        verdict = "fail" if skew >= SKEW_FAIL_MS else "warn"
        return Diagnosis("clock", verdict, f"{skew / 1000:.1f} s from the store's clock", "run NTP on both sides")  # type: ignore[arg-type]
    return Diagnosis("clock", "pass", "agrees with the store's clock within its resolution of a second")


async def store_path(context: Context, endpoint: str) -> Diagnosis:
    """What every process checks at its start: through this endpoint, with each client, no condition is ignored."""
    name = f"store path {endpoint}".rstrip()
    settings = msgspec.structs.replace(context.settings.of(StoreSettings), endpoint=endpoint)
    store = connect(settings, clock=context.clock, ids=context.ids, metrics=context.metrics)
    try:
        prover.demand(await check_path(store, clock=context.clock, ids=context.ids))
    except LakebedError as error:
        return Diagnosis(name, "fail", error.message, error.hint)
    return Diagnosis(name, "pass", "refuses a second create and a stale replace, with small and with large bodies")


async def store_proof(context: Context, endpoints: Sequence[str] = ()) -> Diagnosis:
    """Races the store through its endpoint and the others named, in one race: they may differ about who was first."""
    settings = context.settings.of(StoreSettings)
    doors = _doors(context, endpoints)
    racers = [
        connect(
            msgspec.structs.replace(settings, endpoint=doors[number % len(doors)]),
            clock=context.clock,
            ids=context.ids,
            metrics=context.metrics,
        )
        for number in range(max(RACERS, len(doors)))
    ]
    try:
        prover.demand(await prover.prove(racers, rounds=ROUNDS, clock=context.clock, ids=context.ids))
    except LakebedError as error:
        return Diagnosis("store prover", "fail", error.message, error.hint)
    through = f" through {len(doors)} endpoints" if endpoints else ""
    seen = f"{len(racers)} clients{through}, {ROUNDS} rounds: one winner in every race of creates and of replaces"
    return Diagnosis("store prover", "pass", seen)


def _doors(context: Context, endpoints: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([context.settings.of(StoreSettings).endpoint, *endpoints]))
