"""Active-active ingest: a batch is accepted when its identity manifest is created, and at no other point."""
