"""What the gateway decides. Pure: no bus, no clock, no HTTP."""
