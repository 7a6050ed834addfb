"""Kafka's protocol on the log: a server for its clients, brokers without leaders, groups in meta."""
