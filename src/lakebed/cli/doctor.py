"""`lakebed doctor`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, in_loop
from lakebed.context import Diagnosis
from lakebed.doctor.checks import examine, machine
from lakebed.errors import NotFound

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
    tell = _line if output == "table" else _silent
    try:
        context = where.context("doctor")
    except NotFound as error:  # no stack and no store: this machine can still be looked at
        found = [*machine(where.folder), Diagnosis("store", "fail", error.message, error.hint)]
        for diagnosis in found:
            tell(diagnosis)
    else:
        found = in_loop(lambda: examine(context, where.folder, tell, endpoints=endpoint))
    if output != "table":
        emit(found, output)
    failed = sum(diagnosis.verdict == "fail" for diagnosis in found)
    if output == "table":
        say(f"{failed} failed" if failed else "all good" if all(d.verdict == "pass" for d in found) else "usable")
    return exits.FAILED if failed else exits.OK


def _line(diagnosis: Diagnosis) -> None:
    print(f"{MARKS[diagnosis.verdict]} {diagnosis.name:<23} {diagnosis.seen}", flush=True)
    if diagnosis.fix:
        print(f"  fix: {diagnosis.fix}", flush=True)


def _silent(diagnosis: Diagnosis) -> None:
    return None
