"""Ticks: what an agent collected in one go, uploaded in parts and committed whole.

Parts are stored first, each under a fresh name; a tick is true when its commit record is created. Bronze is written
before it, idempotent by tick; the message to silver, the audit rows and the cached answer come after and are repeated
by the agent's next try when a process dies between them.
"""
