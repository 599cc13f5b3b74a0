"""Steps of a simulated engine: its device, and decode steps that are taken in by a shorter way."""
