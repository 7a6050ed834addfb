"""The whole of Lakebed on one machine: a real S3 server, the gateway and the workers, as children of one process."""
