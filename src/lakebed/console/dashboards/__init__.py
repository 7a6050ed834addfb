"""Grafana dashboards and Prometheus alert rules, generated from the table of metrics."""
