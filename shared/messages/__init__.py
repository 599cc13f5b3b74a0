"""Every message on the bus: one module per receiver, frozen msgspec structs, packed as arrays.

Read `generation.py` first (what travels round the ring), then the receiver that you care about.
"""
