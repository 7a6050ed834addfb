"""Secrets of projects on a stack of this machine: made once, kept in its folder, and made again where they ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Invalid
from lakebed.ticks.adapters import open_vault
from lakebed.ticks.local_secret import FOLDER, KEEP_FORMER_S, local_secret
from lakebed.ticks.model import DEFAULT_ORG
from lakebed.ticks.vault import Vault
from support.tick_fixtures import context_of


@pytest.fixture
def vault(manual_clock: ManualClock) -> Vault:
    return open_vault(context_of(clock=manual_clock))


@pytest.mark.parametrize("org", [DEFAULT_ORG, "acme"])
async def test_a_secret_is_made_at_the_first_push_and_kept(vault: Vault, tmp_path: Path, org: str) -> None:
    """For its owner alone, one for each project; every later push has the same."""
    first, again = [await local_secret(vault, tmp_path, org, "shop") for _ in range(2)]
    other = await local_secret(vault, tmp_path, org, "shop.2")
    files = sorted((tmp_path / FOLDER).iterdir())

    assert first == again != other
    assert await vault.accepts(org, "shop", first) and await vault.accepts(org, "shop.2", other)
    assert [f"{org}.shop", f"{org}.shop.2"] == [file.name for file in files]
    assert {0o600} == {file.stat().st_mode & 0o777 for file in files}


@pytest.mark.parametrize("kept", [True, False])
async def test_a_secret_that_ended_is_made_again_for_the_machines_own_org_alone(
    vault: Vault, manual_clock: ManualClock, tmp_path: Path, kept: bool
) -> None:
    """Somebody rotated it elsewhere, or the folder is new: another org's secret is nobody's to replace here."""
    for org in (DEFAULT_ORG, "acme"):
        if kept:
            await local_secret(vault, tmp_path, org, "shop")
        theirs = await vault.issue(org, "shop")
        if org == DEFAULT_ORG:
            made = await local_secret(vault, tmp_path, org, "shop")
            assert made != theirs
            assert await vault.accepts(org, "shop", made) and await vault.accepts(org, "shop", theirs)
            await manual_clock.advance(KEEP_FORMER_S + 31.0)
            assert [True, False] == [await vault.accepts(org, "shop", each) for each in (made, theirs)]
        else:
            with pytest.raises(Invalid, match="not kept on this machine"):
                await local_secret(vault, tmp_path, org, "shop")
            assert await vault.accepts(org, "shop", theirs)


async def test_two_first_pushes_at_once_both_get_through(vault: Vault, tmp_path: Path) -> None:
    """Each with the secret that it was given; the next has one that is accepted too."""
    made = await asyncio.gather(*(local_secret(vault, tmp_path, DEFAULT_ORG, "shop") for _ in range(2)))
    later = await local_secret(vault, tmp_path, DEFAULT_ORG, "shop")

    assert [True] * 3 == [await vault.accepts(DEFAULT_ORG, "shop", each) for each in (*made, later)]
