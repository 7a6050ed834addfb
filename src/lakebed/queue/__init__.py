"""The queue: stateless ingest through a manifest in the bucket.

Any number of ingestors store batches of entries and append their locations to one producer manifest; collectors claim
them in order through a consumer manifest. A batch is accepted at exactly one conditional write: the replace of the
producer manifest. Everything else (claims, the done list, clean-up, dead letters) is derived and repairable.
"""
