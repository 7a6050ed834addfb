"""Deterministic simulation: one seed decides every interleaving, fault and crash, and replays them exactly."""
