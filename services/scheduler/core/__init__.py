"""What the scheduler decides, as `Engine.handle(event, now) -> outputs`. No clock, no bus, no chance, no torch.

Read `events.py` (what goes in and out), then `engine.py`. It holds a `serving.py` while there are workers, which is:
`admission.py` (may it come in), `planner.py` (the next step) over `line.py`, `sequence.py` and `kv_memory.py`
(`block_pool.py`, `prefix_index.py`), `steps.py` and `pace.py` (what is in flight), `streams.py` (to detokenizers).
Beside them, for the node's KV store: `store.py` (is it there, who leases what), `loads.py` (what it has of a newcomer),
`saves.py` (what goes there), `transfers.py` (what the ranks copy), `hand_overs.py` (what another engine goes on with).
`results.py` judges drawn tokens, `fence.py` keeps late messages out, `ranks.py` watches the workers, and
`invariants.py` says what must hold after every event.
"""
