"""The seam to object storage, and the two primitives built on it: the register and the lease."""
