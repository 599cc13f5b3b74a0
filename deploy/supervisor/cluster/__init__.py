"""A stack of several hosts, each with a supervisor and a nats-server of its own (docs/hosts.md)."""
