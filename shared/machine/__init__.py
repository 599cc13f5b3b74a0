"""What the machine is like that a process runs on: its memory nodes and its processors."""
