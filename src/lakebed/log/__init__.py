"""A leaderless log on the bucket: any broker appends to any partition, one compare-and-swap decides."""
