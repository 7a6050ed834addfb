"""The error tree is complete: every kind has an exit code, and the page in its docstring is the tree."""

from __future__ import annotations

import inspect

from lakebed.cli import exits
from lakebed.core import errors


def kinds(root: type[errors.LakebedError] = errors.LakebedError) -> list[type[errors.LakebedError]]:
    own = [kind for kind in root.__subclasses__() if kind.__module__ == errors.__name__]
    return [root, *(each for kind in own for each in kinds(kind))]


def test_every_kind_stands_on_the_page() -> None:
    """The tree drawn in the module's docstring names every kind."""
    page = errors.__doc__ or ""

    assert [kind.__name__ for kind in kinds() if kind.__name__ not in page] == []


def test_every_kind_has_a_code_of_its_own() -> None:
    """Codes report kinds apart."""
    codes = [kind.code for kind in kinds()]

    assert len(set(codes)) == len(codes)


def test_every_kind_has_an_exit_code() -> None:
    """Every kind ends a command with the code of its family, never with 0."""
    for kind in kinds():
        error = kind("what happened")

        assert exits.code_for(error) not in (exits.OK, exits.USAGE)


def test_detail_is_kept_for_machines() -> None:
    """Named facts given to an error come back in `detail`, apart from message and hint."""
    error = errors.Conflict("two hashes", hint="look", accepted="aa", submitted="bb")

    assert error.detail == {"accepted": "aa", "submitted": "bb"}
    assert (error.message, error.hint) == ("two hashes", "look")


def test_signatures_take_a_message_first() -> None:
    """Any kind can be raised with a message alone."""
    assert all("message" in inspect.signature(kind).parameters for kind in kinds())
