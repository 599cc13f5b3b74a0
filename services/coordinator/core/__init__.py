"""What a coordinator decides, apart from bus and clock. Read `coordinator.py` first, then `router.py`, `fleet.py`."""
