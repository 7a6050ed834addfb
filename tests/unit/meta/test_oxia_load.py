"""What is reported where the Oxia client is not installed."""

from __future__ import annotations

import sys

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Invalid
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.meta.connect import connect
from lakebed.meta.oxia.backend import OxiaMeta
from lakebed.meta.oxia.order import KeyRange
from lakebed.meta.settings import MetaSettings
from lakebed.store.memory import MemoryStore
from lakebed.store.runtime import StoreRuntime


def test_without_the_client_the_extra_to_install_is_named(
    monkeypatch: pytest.MonkeyPatch, manual_clock: ManualClock
) -> None:
    """Choosing the backend without its package is reported at once, with what to type."""
    monkeypatch.setitem(sys.modules, "oxia", None)

    with pytest.raises(Invalid) as reported:
        connect(
            MetaSettings.of({"backend": "oxia"}),
            StoreRuntime(manual_clock, Ids(), Metrics(), MemoryStore(clock=manual_clock)),
        )

    assert "lakebed[oxia]" in reported.value.hint


def test_the_bucket_backend_is_chosen_by_its_name(manual_clock: ManualClock) -> None:
    """Settings alone decide which store the log coordinates through."""
    made = connect(
        MetaSettings.of({"backend": "bucket"}),
        StoreRuntime(manual_clock, Ids(), Metrics(), MemoryStore(clock=manual_clock)),
    )

    assert type(made).__name__ == "BucketMeta"


@pytest.mark.parametrize("sorting", ["hierarchical", "natural"])
def test_how_the_server_sorts_is_a_setting(sorting: str, manual_clock: ManualClock) -> None:
    """A server that sorts keys by their bytes is requested whole ranges; another for pieces of them."""
    pytest.importorskip("oxia")
    made = connect(
        MetaSettings.of({"backend": "oxia", "sorting": sorting}),
        StoreRuntime(manual_clock, Ids(), Metrics(), MemoryStore(clock=manual_clock)),
    )

    assert isinstance(made, OxiaMeta)
    assert (sorting == "natural") == (made._key_ranges("a/", "a0") == [KeyRange("a/", "a0", True)])
