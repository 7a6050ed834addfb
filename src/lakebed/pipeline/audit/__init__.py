"""Audits as joins: what must agree in the bucket is joined against one listing of it."""
