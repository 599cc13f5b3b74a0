"""Every message on the bus: one module per receiver, frozen msgspec structs, packed as arrays.

Read `generation.py` first (the request that passes through the services), then the receiver that you care about.

Structs of which there is one per token have `gc=False`: they are never part of a reference cycle, so the garbage
collector need not track them.
"""
