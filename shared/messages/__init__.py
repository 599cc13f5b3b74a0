"""Every message on the bus: one module per receiver, frozen msgspec structs, packed as arrays.

Read `generation.py` first (what travels round the ring), then the receiver that you care about.

What there is one of for each token is made with `gc=False`: nothing in it leads back to it, so the collector of cycles
need neither look at it nor be woken up for it.
"""
