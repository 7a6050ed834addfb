"""Lifecycle: expiration rules that really run, driven by events. See docs/parts/lifecycle.md."""
