"""The store's fast path: signed conditional PUTs past obstore (`store.fast_path`).

It applies to plain HTTP (`http://`) with a static key pair and objects of at most 256 KiB. It does not apply to TLS,
instance roles or proxies; those, larger objects and all other verbs use obstore, as does everything with
`store.fast_path = false`.
"""
