"""`lakebed meta` on the bucket backend: what a group's head holds, and what a sweep leaves behind on the trail."""

from __future__ import annotations

import asyncio

import pytest

from lakebed.cli import exits
from lakebed.meta.connect import connect
from lakebed.meta.settings import MetaSettings
from support.shell import Shell


@pytest.fixture
def bucket_meta(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Two partitions of a topic, whose keys are in the bucket."""
    monkeypatch.setenv("LAKEBED_META_BACKEND", "bucket")
    for partition in ("0", "1"):
        shell("topics", "produce", "orders", "-p", partition, stdin=b"a\nb\n")
    return shell


def test_groups_and_their_heads_are_shown(bucket_meta: Shell) -> None:
    """Each partition is a group; the head shows its keys with decoded values and versions."""
    groups = [row["partition_key"] for row in bucket_meta.data("meta", "groups")]
    head = bucket_meta.data("meta", "dump", "orders:1")
    (control,) = [row for row in head["hot"] if row["key"].endswith("/meta/control")]
    got = bucket_meta.data("meta", "get", control["key"], "-g", "orders:1")

    assert ["orders:0", "orders:1"] == sorted(groups)
    assert "orders/partitions/1/" in control["key"] and "\0" not in control["key"]
    assert (control["value"], control["version"]) == (got["value"], got["version"])
    assert "OPEN" == control["value"]["log_state"]


def test_a_sweep_deletes_what_a_dry_one_names_and_is_on_the_trail(
    bucket_meta: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing refers to these leaves and they are old; the dry run changes nothing and leaves no line."""
    meta = connect(bucket_meta.contexts[-1].settings.of(MetaSettings), bucket_meta.contexts[-1])
    orphans = ["meta/x/leaf-1", "meta/x/leaf-2"]
    swept: list[str] = []

    async def listed(self: object) -> list[str]:
        return orphans

    async def deleted(self: object) -> int:
        swept.extend(orphans)
        return len(orphans)

    monkeypatch.setattr(type(meta), "orphans", listed)
    monkeypatch.setattr(type(meta), "sweep", deleted)

    code, out, dry = bucket_meta("meta", "sweep", "--dry-run")
    untouched, none = list(swept), bucket_meta.deeds()
    _, _, said = bucket_meta("meta", "sweep")
    asyncio.run(meta.close())

    assert (exits.OK, ["key", *orphans], "would delete 2", [], []) == (code, out.split(), dry.strip(), untouched, none)
    assert ("deleted 2", orphans) == (said.strip(), swept)
    assert [("meta.sweep", "done")] == [(deed[0], deed[3]) for deed in bucket_meta.deeds()]
