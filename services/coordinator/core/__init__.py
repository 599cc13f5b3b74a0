"""What a coordinator decides, apart from any bus or clock. Read `coordinator.py` first."""
