"""`lakebed serve` and `lakebed work`: the two long-running processes."""

from __future__ import annotations
