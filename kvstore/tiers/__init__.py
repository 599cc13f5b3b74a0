"""Lower tiers behind one interface: Redis, and the stores of other nodes."""
