"""Checkpoints whose weights are codes of eight or four bits: how other programs wrote them, read as ours."""
