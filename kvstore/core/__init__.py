"""What the KV store decides: slots, index, eviction, leases. Pure."""
