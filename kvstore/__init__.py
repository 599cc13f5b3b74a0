"""The KV-cache store, one process on each node: blocks in shared memory, found by hash. `python -m kvstore`.

Read `core/layout.py` (the files), `core/store.py` (what is decided), `node_store.py` (made so), `actor.py` (the bus).
"""
