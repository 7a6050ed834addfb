"""Secrets of projects: never stored in the clear, one for a pair, openable with old keys after a change of keys."""

from __future__ import annotations

import pytest
from cryptography.fernet import Fernet

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Denied, Invalid, Unauthenticated, Unavailable
from lakebed.core.settings import Secret
from lakebed.store.memory import MemoryStore
from lakebed.ticks.adapters import open_vault
from lakebed.ticks.vault import key_ring
from support.tick_fixtures import context_of


async def test_a_secret_is_encrypted_at_rest_and_opens_its_pair_alone() -> None:
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
    await there.admit("acme", "p", old)

    new = await here.issue("acme", "p")
    with pytest.raises(Denied):
        await here.admit("acme", "p", old)
    remembered = await there.admit("acme", "p", old)
    await manual_clock.advance(31.0)

    assert "acme" == remembered
    with pytest.raises(Denied):
        await there.admit("acme", "p", old)
    assert "acme" == await there.admit("acme", "p", new)


async def test_keys_can_be_changed_without_losing_secrets() -> None:
    """The new key in front of the old one opens both; the new one alone does not, and says so."""
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
    token = key_ring(Secret(""), Secret("the-store"))
    again = key_ring(Secret(""), Secret("the-store"))

    assert token is not None and again is not None
    assert b"x" == again.decrypt(token.encrypt(b"x"))
    assert None is key_ring(Secret(""), Secret(""))
    with pytest.raises(Invalid):
        key_ring(Secret("short"), Secret(""))
