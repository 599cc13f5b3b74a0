"""The KV-cache store, one process on each node: blocks in shared memory, found by hash. `python -m kvstore`.

Read `core/layout.py` (the files), `core/store.py` (what is decided), `node/node_store.py` (carried out in
the arenas), `actor.py` (the bus).
"""
