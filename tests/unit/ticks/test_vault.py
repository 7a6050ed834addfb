"""Secrets of projects: never stored in the clear, one for a pair, openable with old keys after a change of keys."""

from __future__ import annotations

import json

import pytest
from cryptography.fernet import Fernet, InvalidToken

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Denied, Invalid, Unauthenticated, Unavailable
from lakebed.core.settings import Secret
from lakebed.store.memory import MemoryStore
from lakebed.ticks import paths
from lakebed.ticks.adapters import open_vault
from lakebed.ticks.vault import ABSENT_S, key_ring
from support.counting_store import count_requests
from support.tick_fixtures import context_of


async def test_the_stored_form_is_a_hash_that_cannot_be_turned_back() -> None:
    """Whoever has the bucket and the vault's key has neither the secret nor what is let in instead of it."""
    key = Fernet.generate_key()
    context = context_of(payload_key=key.decode())
    vault = open_vault(context)
    await vault.issue("acme", "p")
    again = await vault.issue("acme", "p", keep_former_s=60.0)
    stored = json.loads((await context.store.get(paths.secret("acme", "p"))).data)

    texts = [value for value in stored.values() if isinstance(value, str) and value]
    assert {64} == {len(stored[name]) for name in ("hash", "former")}
    for text in texts:
        with pytest.raises(InvalidToken):
            Fernet(key).decrypt(text)
        with pytest.raises(Denied):
            await vault.admit("acme", "p", text)
    assert not {piece for piece in again.split("_")[2:] if piece in str(stored)}


async def test_a_secret_is_hashed_at_rest_and_opens_its_pair_alone() -> None:
    """The bucket holds no trace of it; the right one is let in, everything else is not."""
    context = context_of()
    vault = open_vault(context)
    secret = await vault.issue("acme", "p")

    stored = [(await context.store.get(info.key)).data async for info in context.store.list("")]
    admitted = await vault.admit("acme", "p", secret)

    assert "acme" == admitted
    assert all(secret.encode() not in data for data in stored)
    for org, project, sent in (("acme", "p", secret[:-1]), ("acme", "q", secret), ("rival", "p", secret)):
        with pytest.raises(Denied):
            await vault.admit(org, project, sent)
    for org, sent in ((None, secret), ("acme", None), ("", "")):
        with pytest.raises(Unauthenticated):
            await vault.admit(org, "p", sent)


async def test_a_new_secret_ends_the_old_one_everywhere(manual_clock: ManualClock) -> None:
    """At once where it was issued, elsewhere when the remembered one is over."""
    store = MemoryStore(clock=manual_clock)
    here, there = (open_vault(context_of(store, clock=manual_clock, node=n, seed=i)) for i, n in enumerate("ab"))
    old = await here.issue("acme", "p")
    for replica in (here, there):
        await replica.admit("acme", "p", old)

    new = await here.issue("acme", "p")
    with pytest.raises(Denied):
        await here.admit("acme", "p", old)
    assert "acme" == await here.admit("acme", "p", new)
    remembered = await there.admit("acme", "p", old)
    await manual_clock.advance(31.0)

    assert "acme" == remembered
    with pytest.raises(Denied):
        await there.admit("acme", "p", old)
    assert "acme" == await there.admit("acme", "p", new)


async def test_keys_can_be_changed_without_losing_secrets() -> None:
    """The new key in front of the old one opens both; the new one alone does not, and reports it."""
    old, new = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    context = context_of(payload_key=old)
    secret = await open_vault(context).issue("acme", "p")

    both = open_vault(context_of(context.store, payload_key=f"{new},{old}", seed=2))
    alone = open_vault(context_of(context.store, payload_key=new, seed=3))

    assert "acme" == await both.admit("acme", "p", secret)
    with pytest.raises(Unavailable):
        await alone.admit("acme", "p", secret)


def test_without_a_key_one_is_made_from_the_stores_own() -> None:
    """The same in every replica; none where the store has none either; a key that is none is refused."""
    assert key_ring(Secret(""), Secret("the-store")) == key_ring(Secret(""), Secret("the-store"))
    assert key_ring(Secret(""), Secret("the-store")) != key_ring(Secret(""), Secret("another"))
    assert () == key_ring(Secret(""), Secret(""))
    for wrong in ("short", "é", "A" * 44 + ",x"):
        with pytest.raises(Invalid):
            key_ring(Secret(wrong), Secret(""))


async def test_the_stored_form_of_one_project_is_worth_nothing_at_another() -> None:
    """Whoever can copy objects in the bucket does not thereby get into another project."""
    context = context_of()
    secret = await open_vault(context).issue("acme", "p")
    stored = (await context.store.get(paths.secret("acme", "p"))).data
    await context.store.create(paths.secret("acme", "q"), stored)

    with pytest.raises(Denied):
        await open_vault(context).admit("acme", "q", secret)


async def test_a_rotated_secret_works_beside_the_new_one_as_long_as_asked(manual_clock: ManualClock) -> None:
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    vault = open_vault(context)
    old = await vault.issue("acme", "p")
    new = await vault.issue("acme", "p", keep_former_s=60.0)

    assert ["acme", "acme"] == [await vault.admit("acme", "p", secret) for secret in (old, new)]
    await manual_clock.advance(60.0)
    with pytest.raises(Denied):
        await vault.admit("acme", "p", old)
    assert "acme" == await vault.admit("acme", "p", new)


def forged(secret: str) -> list[str]:
    """What a stranger can send who knows the form of a secret."""
    form = secret.split("_")
    return ["0" * 40, secret[:-1], secret + "0", "_".join([*form[:2], "0" * 40, form[3]]), "_".join(form[:3]), "lbt_é_"]


async def test_strangers_cost_the_store_no_request_whether_a_name_exists_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A secret proves that it was issued for its pair; without that proof nothing is read, listed or waited for."""
    context = context_of()
    secret = await open_vault(context).issue("acme", "p")
    vault, asked = open_vault(context), count_requests(monkeypatch, context.store)

    for org, project in (("acme", "p"), ("acme", "invented"), ("invented", "p")):
        for wrong in (*forged(secret), *([secret] if org != "acme" or project != "p" else [])):
            with pytest.raises(Denied):
                await vault.admit(org, project, wrong)

    assert [] == asked
    assert "acme" == await vault.admit("acme", "p", secret)
    assert ["get"] == asked


async def test_a_secret_of_a_key_that_is_not_set_costs_no_request_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported as what it is, a difference of settings, from the secret alone."""
    other = open_vault(context_of(payload_key=Fernet.generate_key().decode()))
    secret = await other.issue("acme", "p")
    context = context_of(payload_key=Fernet.generate_key().decode())
    asked = count_requests(monkeypatch, context.store)

    with pytest.raises(Unavailable, match="payload_key"):
        await open_vault(context).admit("acme", "p", secret)

    assert [] == asked


async def test_a_secret_that_was_removed_is_looked_for_once_in_five_seconds(
    monkeypatch: pytest.MonkeyPatch, manual_clock: ManualClock
) -> None:
    """Its holder is no stranger, and costs no more than anybody whose secret is remembered."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    vault = open_vault(context)
    secret = await vault.issue("acme", "p")
    await context.store.delete(paths.secret("acme", "p"))
    asked = count_requests(monkeypatch, context.store)

    for _ in range(10):
        with pytest.raises(Denied):
            await vault.admit("acme", "p", secret)
    assert ["get"] == asked
    await manual_clock.advance(ABSENT_S)
    with pytest.raises(Denied):
        await vault.admit("acme", "p", secret)

    assert ["get", "get"] == asked
