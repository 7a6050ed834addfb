"""Beside the numbers of a bench exists where its fast paths apply."""

from __future__ import annotations

from typing import Any

import pytest

from lakebed.bench.commands import FAST_PATHS, note_of
from lakebed.core.settings import load
from lakebed.wiring.parts import sections

PLAIN = {"store.endpoint": "http://127.0.0.1:8333", "store.access_key_id": "id", "store.secret_access_key": "secret"}
TLS = PLAIN | {"store.endpoint": "https://s3.test"}


@pytest.mark.parametrize(
    ("name", "flags", "noted"),
    [
        ("store", PLAIN, True),
        ("queue", PLAIN, True),
        ("store", PLAIN | {"store.fast_path": False}, False),
        ("store", TLS, False),
        ("log", TLS, True),
        ("log", TLS | {"gateway.fast_path": False}, False),
        ("gateway", PLAIN, False),
    ],
)
def test_a_bench_that_uses_a_fast_path_says_where_it_applies(name: str, flags: dict[str, Any], noted: bool) -> None:
    assert (FAST_PATHS if noted else "") == note_of(name, load(sections(), flags=flags))
