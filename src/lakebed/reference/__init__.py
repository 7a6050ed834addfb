"""The reference pages, made from what runs: commands, settings, metrics, HTTP routes, alerts and dashboards."""
