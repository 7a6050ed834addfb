"""Placeholder of the branch that builds the stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ENDPOINTS_FILE = "endpoints.json"


def find(folder: Path) -> Any:
    raise NotImplementedError
