"""Every exception that can come from below has a Lakebed kind."""

from __future__ import annotations

import pytest
from obstore import exceptions as obex

from lakebed.core import errors
from lakebed.store.obstore_client import KINDS, translate

EXPORTED = sorted(name for name in dir(obex) if isinstance(getattr(obex, name), type))


@pytest.mark.parametrize("name", EXPORTED)
def test_every_exception_obstore_exports_is_mapped(name: str) -> None:
    """An exception class that a new obstore adds fails here until it is given a kind."""
    assert getattr(obex, name) in KINDS


def test_not_found_is_pythons_own_exception_too() -> None:
    """obstore raises the built-in FileNotFoundError."""
    assert isinstance(translate(FileNotFoundError("gone"), "get", "a/b"), errors.NotFound)


def test_what_nobody_knows_is_unavailable() -> None:
    """An unforeseen exception claims nothing about what was done."""
    assert isinstance(translate(RuntimeError("?"), "get", "a/b"), errors.Unavailable)


def test_our_own_errors_pass_through() -> None:
    """An error that already has a kind keeps it."""
    error = errors.Corrupt("x")

    assert error is translate(error, "get", "a/b")


def test_messages_name_verb_and_key_and_stay_short() -> None:
    """A translated message reports the request and its key, without pages of debug text."""
    mapped = translate(obex.GenericError("boom " * 1000), "create", "a/b")

    assert mapped.message.startswith("create 'a/b': boom")
    assert len(mapped.message) < 500
