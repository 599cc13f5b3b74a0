"""The scheduler: decides what one engine's workers compute. `actor.py` is the bus, `core/` decides."""
