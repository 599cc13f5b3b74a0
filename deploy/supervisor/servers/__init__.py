"""The servers and memory that services depend on: nats-server, redis-server, shared memory of the KV store."""
