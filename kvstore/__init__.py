"""The KV-cache store's place. Not built yet: until it is, each engine caches prefixes for itself alone."""
