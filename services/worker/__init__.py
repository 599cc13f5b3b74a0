"""One rank of an engine: a process that executes step plans on a device."""

from shared.config import sleep_behind_operations

sleep_behind_operations()  # sampling has operations of PyTorch's, and a decode step's own threads share their cores
