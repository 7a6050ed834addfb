"""The SeaweedFS filer: its entries, its log of changes, its conditional transactions. Only this package uses gRPC."""

import os

# Must be set before gRPC is loaded. With its own fork handlers, the first program that a process with a busy channel
# starts is aborted before it runs: beside a lifecycle worker that was Spark's Java. We fork only to exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
