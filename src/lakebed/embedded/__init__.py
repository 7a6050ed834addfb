"""The local stack: a real S3 server, the gateway and the workers, as child processes of one supervisor."""
