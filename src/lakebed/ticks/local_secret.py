"""Secrets of projects on a stack of this machine: made at the first push, and kept in the stack's folder.

The bucket has their hashes only. The file is readable by its owner alone, who has the stack's credentials anyway.
"""

from __future__ import annotations

from pathlib import Path

from lakebed.core import private
from lakebed.core.errors import Invalid
from lakebed.ticks import paths
from lakebed.ticks.model import DEFAULT_ORG
from lakebed.ticks.vault import Vault

FOLDER = "ticks-secrets"
KEEP_FORMER_S = 60.0  # two first pushes at once: both get through


async def local_secret(vault: Vault, folder: Path, org_id: str, project_id: str) -> str:
    """The pair's secret, made where there is none. Raises Invalid when the pair has one that is not kept here."""
    file = folder / FOLDER / f"{paths.check_name('org', org_id)}.{paths.check_name('project', project_id)}"
    kept = file.read_text() if file.is_file() else ""
    if kept and await vault.accepts(org_id, project_id, kept):
        return kept
    if org_id != DEFAULT_ORG and await vault.knows(org_id, project_id):
        raise Invalid(
            "the project has a secret, which is not kept on this machine", hint="set it as LAKEBED_TICKS_API_SECRET"
        )
    secret = await vault.issue(org_id, project_id, keep_former_s=KEEP_FORMER_S)
    private.folder(file.parent)
    private.write(file, secret.encode())
    return secret
