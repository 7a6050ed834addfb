"""Fixtures of the integration lane."""

from support.gateway_process import start

__all__ = ["start"]
