"""Grafana dashboards and Prometheus alert rules, made from the table of metrics and nothing else."""
