"""The `.lmbatch` frame: how an agent's samples travel and are kept. Shared by agent, collector and pipeline."""
