"""The seeds and crash points of a test: some in every run, all of them in `make test-full`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def seeds(every: Iterable[int], *, quick: Container[int]) -> list[Any]:
    """Each value as a parameter; those that are not in `quick` are marked `full`."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.full) for value in every]
