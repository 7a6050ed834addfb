"""`lakebed keys`: a secret is printed once and stored as a hash; what a dry run leaves alone; what the trail keeps."""

from __future__ import annotations

import asyncio
import hashlib

import msgspec
import pytest

from lakebed.cli import exits
from lakebed.gateway.keys import LIST_KEY, session_list
from support.shell import Shell


def test_a_key_is_added_listed_rotated_and_revoked(shell: Shell) -> None:
    """Each secret is shown once, and the list shows none."""
    made = shell.data("keys", "add", "ann", "--rights", "log:*", "--tenant", "acme", "--expires", "90d")
    turned = shell.data("keys", "rotate", "ann", "--reason", "it leaked")
    _, listed, _ = shell("keys", "list", "-o", "json")
    rows = shell.data("keys", "list")
    shell("keys", "revoke", "ann", "--reason", "she left")

    assert made["secret"] != turned["secret"] and made["secret"].startswith("lbk_")
    assert made["secret"] not in listed and turned["secret"] not in listed
    assert ("ann", "active", "acme", "log:*") == tuple(rows[0][name] for name in ("name", "state", "tenant", "rights"))
    assert [] == shell.data("keys", "list")


def test_the_bucket_has_the_hash_and_not_the_secret(shell: Shell) -> None:
    secret = shell.data("keys", "add", "ann", "--rights", "*")["secret"]
    stored = asyncio.run(shell.store.get(LIST_KEY)).data

    assert secret.encode() not in stored
    assert hashlib.sha256(secret.encode()).hexdigest().encode() in stored


def test_a_mistake_changes_nothing_and_says_what_to_type(shell: Shell) -> None:
    """A name that is taken, a key without rights, no reason, a key that is not there, a date that is none."""
    shell.data("keys", "add", "ann", "--rights", "*")
    before = shell.data("keys", "list")
    codes = [
        shell("keys", *words.split())[0]
        for words in (
            "add ann --rights *",
            "add bob",
            "add bob --rights * --expires soon",
            "add bob --rights * --tenant a-b",
            "revoke bob --reason why",
            "revoke ann",
        )
    ]

    assert exits.OK not in codes
    assert before == shell.data("keys", "list")


def test_a_dry_run_changes_nothing(shell: Shell) -> None:
    shell("keys", "add", "bob", "--rights", "*", "--dry-run")
    shell.data("keys", "add", "ann", "--rights", "*")
    before = shell.data("keys", "list")
    for words in ("revoke ann --reason why --dry-run", "rotate ann --reason why --dry-run"):
        assert exits.OK == shell("keys", *words.split())[0]

    assert before == shell.data("keys", "list") and ["ann"] == [row["name"] for row in before]


def test_the_list_shows_when_a_key_was_last_used_and_which_has_ended(shell: Shell) -> None:
    """So that an operator sees which keys can go."""
    for name, more in (("ann", []), ("bob", ["--expires", "1d"])):
        shell.data("keys", "add", name, "--rights", "*", *more)
    used = session_list(shell.contexts[-1])
    asyncio.run(used.change(lambda known: (msgspec.structs.replace(known, used={"ann": 1_760_000_000_000}), None)))
    shell.clock.ahead_s = 2 * 86_400

    rows = {row["name"]: row for row in shell.data("keys", "list")}

    assert ("2025-10-09 08:53", "-") == (rows["ann"]["last_use"], rows["bob"]["last_use"])
    assert ("active", "expired") == (rows["ann"]["state"], rows["bob"]["state"])


@pytest.mark.parametrize(("expires", "lasts_s"), [("90d", 90 * 86_400), ("1d", 86_400)])
def test_a_key_lasts_for_the_days_that_it_was_given(shell: Shell, expires: str, lasts_s: float) -> None:
    """Days, from now on, to the minute."""
    shell.data("keys", "add", "ann", "--rights", "*", "--expires", expires)
    states = []
    for ahead_s in (lasts_s - 60, lasts_s + 60):
        shell.clock.ahead_s = ahead_s
        states.append(shell.data("keys", "list")[0]["state"])

    assert ["active", "expired"] == states


def test_each_limit_of_a_key_is_the_one_that_was_named(shell: Shell) -> None:
    """And its last day is the one that was given; a key that has none says so."""
    names = ("requests_per_s", "bytes_per_s", "records_per_s", "topics_max", "series_max", "uploads_max")
    limits = [word for n, name in enumerate(names, 1) for word in (f"--{name.replace('_', '-')}", str(n))]
    shell.data("keys", "add", "ann", "--rights", "*", "--expires", "2127-01-31", *limits)
    shell.data("keys", "add", "bob", "--rights", "*")

    ann, bob = shell.data("keys", "list")

    assert ", ".join(f"{name} {n}" for n, name in enumerate(names, 1)) == ann["limits"]
    assert ("2127-01-31 23:59", "-", "-", "") == (ann["expires"], bob["expires"], bob["last_use"], bob["limits"])
