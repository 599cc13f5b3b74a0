"""What the scheduler decides, as `EngineCore.handle(event, now) -> outputs`. No clock, no bus, no chance, no torch.

Read `events.py` (what goes in and out), then `engine.py`. While there are workers it holds an `epoch.py`, the state of
one epoch, which has four packages: `queue/` (waiting and running sequences), `planning/` (what the next step computes),
`transfer/` (blocks on their way from and to the KV store), and `results/` (what is sent of what was computed).
`memory.py` has the blocks and their owners, `sequence.py` is one request inside, and `invariants.py` says what holds
after every event.
"""
