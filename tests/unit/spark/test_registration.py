"""Sources are registered by an import where that is possible, and never break one."""

from __future__ import annotations

import subprocess
import sys

PART_FIRST = """
from pyspark.sql import SparkSession

SparkSession.getActiveSession = classmethod(lambda cls: object())  # any session: registering with it would fail
import lakebed.pipeline.tables.sink
"""


def test_a_part_is_imported_first_while_a_session_is_active() -> None:
    """A worker of Spark imports a part before this package: nothing is registered, and the import succeeds."""
    subprocess.run([sys.executable, "-c", PART_FIRST], check=True)
