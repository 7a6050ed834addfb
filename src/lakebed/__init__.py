"""Lakebed: everything that lies under a data lake, on one bucket."""

__version__ = "0.1.0"
