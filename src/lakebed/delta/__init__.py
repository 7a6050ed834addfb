"""The Delta table format without an engine: its log, its snapshots, and small tables written through the store seam."""
