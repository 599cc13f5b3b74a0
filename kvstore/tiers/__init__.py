"""Lower tiers behind one interface: a local SSD, Redis, and the stores of other nodes."""
