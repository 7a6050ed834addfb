"""Ticks: Parquet files that an agent uploads in parts and that are committed together.

Parts are stored first, each under a fresh name; a tick is committed when its commit record is created. Bronze is
written before it, idempotent by tick; the message to silver, the audit rows and the cached result come after; the
agent's next attempt repeats them when a process dies between them.
"""
