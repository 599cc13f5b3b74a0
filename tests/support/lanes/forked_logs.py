"""What is forked of a process of tests has what that process logs to: files of pytest's capture, whose descriptors may
be a pipe of somebody else's by then. A warning of `transformers` was read as a message of `multiprocessing`."""

from __future__ import annotations

import logging
import os
import sys


def log_to_own_errors() -> None:
    """Has output, errors and all loggers write to descriptors 1 and 2."""
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):  # of names without a logger there are none
            if type(handler) is logging.StreamHandler:  # pytest's own kinds keep what they get in memory
                handler.stream = sys.stderr  # setStream would flush the one before
