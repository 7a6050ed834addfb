"""The seeds, crash points and planted bugs of a test: some in `make test`, the others in `make test-full`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def seeds(every: Iterable[Any], *, quick: Container[Any]) -> list[Any]:
    """Each value as a parameter; those that are not in `quick` are marked `full`."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.full) for value in every]
