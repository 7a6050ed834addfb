"""The small ordered key-value store that coordinates the log's brokers: one interface, several backends."""
