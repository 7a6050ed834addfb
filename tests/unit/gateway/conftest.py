from __future__ import annotations

from conftest_gateway import ask, make, part

__all__ = ["ask", "make", "part"]
