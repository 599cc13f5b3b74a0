"""What the scheduler decides, as `Engine.handle(event, now) -> outputs`. No clock, no bus, no chance, no torch.

Read `events.py` (what goes in and out), then `engine.py`. It holds a `serving.py` while there are workers, which is:
`admission.py` (may it come in), `planner.py` (the next step) over `line.py`, `sequence.py` and `kv_memory.py`
(`block_pool.py`, `prefix_index.py`), `steps.py` and `pace.py` (what is in flight), `streams.py` (to detokenizers).
`results.py` judges drawn tokens, `fence.py` keeps late messages out, `ranks.py` watches the workers, and
`invariants.py` says what must hold after every event.
"""
