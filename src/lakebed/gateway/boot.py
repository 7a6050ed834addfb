"""What must hold before a process may serve: known parts, the path to the store, the bucket's authority and proof."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lakebed.context import Context
from lakebed.errors import Corrupt, Invalid
from lakebed.gateway.settings import GatewaySettings
from lakebed.logs import logger
from lakebed.parts import PARTS
from lakebed.store.authority import Authority, claim
from lakebed.store.connect import connect
from lakebed.store.guarded import GuardedStore
from lakebed.store.path_check import check_path
from lakebed.store.protocol import Store
from lakebed.store.prover import REPORTS, Proof, demand, prove
from lakebed.store.settings import StoreSettings

PROOF_CLIENTS = 4
PROOF_ROUNDS = 2

log = logger("gateway")


async def boot(context: Context, parts: Sequence[str] = ()) -> Authority:
    """Everything that must hold before a part is built; returns the bucket's authority.

    Raises Invalid for an unknown part or a store without conditional writes, Conflict when the bucket carries another
    authority than `store.authority`, Unavailable when the store does not answer.
    """
    check_parts(parts)
    if writes(context, parts):
        await path_holds(context)
    expected = context.settings.of(StoreSettings).authority
    authority = await claim(context.store, expected=expected, clock=context.clock, ids=context.ids)
    if context.settings.of(GatewaySettings).prove == "auto" and writes(context, parts):
        await proven(context)
    return authority


def writes(context: Context, parts: Sequence[str]) -> bool:
    """Whether this process writes under conditions."""
    return needs_proof(parts) and not context.settings.of(GatewaySettings).read_only


async def path_holds(context: Context) -> None:
    """Returns when conditions hold on this process's own path to the store, whoever proved the bucket through another.

    Raises Invalid, saying what failed and what to do.
    """
    if isinstance(context.store, GuardedStore):
        demand(await context.store.check())
    else:
        demand(await check_path(context.store, clock=context.clock, ids=context.ids))


def check_parts(parts: Sequence[str]) -> None:
    known = [part.name for part in PARTS if part.component or part.workers]
    unknown = sorted(set(parts) - set(known))
    if unknown:
        raise Invalid(f"no part is named {', '.join(unknown)}", hint=f"parts: {', '.join(known) or 'none'}")


def needs_proof(parts: Sequence[str]) -> bool:
    return any(
        part.active_active and (part.component or part.workers) for part in PARTS if not parts or part.name in parts
    )


async def proven(context: Context) -> None:
    """Returns when a stored proof holds, or a new one does. Raises Invalid, saying what failed and what to do."""
    proof = await _stored(context.store)
    if proof is None:
        proof = await prove(
            _rivals(context), rounds=PROOF_ROUNDS, clock=context.clock, ids=context.ids, keep_report=True
        )
        log.info("store proven" if proof.held else "store refused", clients=proof.clients, rounds=proof.rounds)
    demand(proof)


async def _stored(store: Store) -> Proof | None:
    """The newest report in the bucket that holds; a report of a failure is never believed, the store may be mended."""
    newest = ""
    async for info in store.list(REPORTS):
        newest = max(newest, info.key)
    if not newest:
        return None
    try:
        proof = msgspec.json.decode((await store.get(newest)).data, type=Proof)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Corrupt(f"{newest!r} does not decode: {error}", hint="look at it, then delete it", key=newest) from error
    return proof if proof.held else None


def _rivals(context: Context) -> list[Store]:
    settings = context.settings.of(StoreSettings)
    if settings.url.startswith("memory:"):
        return [context.store] * PROOF_CLIENTS
    more = [
        connect(settings, clock=context.clock, ids=context.ids, metrics=context.metrics)
        for _ in range(PROOF_CLIENTS - 1)
    ]
    return [context.store, *more]
