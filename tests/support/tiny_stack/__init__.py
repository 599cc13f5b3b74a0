"""A stack whose actors, but for the coordinator, do nothing but live: what the supervisor is tested on."""
