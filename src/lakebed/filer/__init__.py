"""The SeaweedFS filer: its entries, its log of changes, its conditional transactions. Only this package speaks gRPC."""
