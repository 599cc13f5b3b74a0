"""What the scheduler decides, as `Engine.handle(event, now) -> outputs`. No clock, no bus, no chance, no torch.

Read `events.py` (what goes in and out), then `engine.py`, then the state it is made of: `sequence.py`, `line.py`,
`kv_memory.py` over `block_pool.py` and `prefix_index.py`, `planner.py`, `steps.py`, `streams.py`, `fence.py`.
"""
