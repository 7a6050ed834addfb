"""The pipeline from bronze to gold, and what a file of models imports:

    from lakebed import pipeline as lp

    @lp.table(keys=["customer_id"], incremental="merge")
    def revenue_by_customer(orders: lp.Changes["silver.orders"]): ...

Nothing here loads Spark: a model's file can be read, ordered and documented without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lakebed.pipeline.models.definition import Changes, Feed, Table, materialized_view, table
    from lakebed.pipeline.models.testing import run_model

__all__ = ["Changes", "Feed", "Table", "materialized_view", "run_model", "table"]

_PLACES = dict.fromkeys(__all__, "lakebed.pipeline.models.definition")
_PLACES["run_model"] = "lakebed.pipeline.models.testing"


def __getattr__(name: str) -> Any:
    """Loaded when it is used: settings and workers of this package are imported by processes without models."""
    if name not in _PLACES:
        raise AttributeError(f"module 'lakebed.pipeline' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
