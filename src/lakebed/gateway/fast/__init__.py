"""The gateway's fast path: requests past ASGI, on methods of uvicorn that are not public (`gateway.fast_path`).

With `gateway.fast_path = false` nothing in this folder is used: requests go through uvicorn and ASGI alone, and get the
same answers. The fast path is for plain HTTP/1.1 requests, and it is off while the gateway traces.
pyproject.toml pins uvicorn to the minor version whose methods `tests/unit/gateway/test_uvicorn.py` checks.
"""
