"""`bench kv`: how fast KV blocks move to and from arenas, other nodes and Redis, beside a plain memory copy."""
