from __future__ import annotations

from support.gateway_fixtures import ask, make, part

__all__ = ["ask", "make", "part"]
