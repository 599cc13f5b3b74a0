"""What an encoder decides: no bus, no clock, no torch."""
