"""What is forked of a process of tests has what that process logs to: files of pytest's capture, whose descriptors may
be a pipe or a connection of somebody else's by then. Warnings of `transformers` were read as messages of
`multiprocessing`, and by ranks as each other's."""

from __future__ import annotations

import logging
import os
import sys


def log_to_own_errors() -> None:
    """Has output, errors and all loggers write to descriptors 1 and 2; pytest's handlers, one of which writes to a
    file, are taken away."""
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in list(getattr(logger, "handlers", ())):  # of names without a logger there are none
            if type(handler) is logging.StreamHandler:
                handler.stream = sys.stderr  # setStream would flush the one before
                vars(handler).pop("flush", None)  # `transformers` has that of its standard error at import here
            elif type(handler).__module__.startswith("_pytest."):
                logger.removeHandler(handler)
