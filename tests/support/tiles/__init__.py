"""Tile instructions (AMX) for processors that have none."""
