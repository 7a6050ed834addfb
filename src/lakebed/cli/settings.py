"""`lakebed settings`."""

from __future__ import annotations

from lakebed.cli.output import Output, emit
from lakebed.cli.where import Where


def settings(*, where: Where = Where(), output: Output = "table") -> None:
    """Show every setting, its value and where it comes from. Secrets are masked."""
    emit(where.settings().rows(), output)
