"""The small ordered key-value seam that the log coordinates through."""
