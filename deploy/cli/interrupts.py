"""What Ctrl-C does before there is anything to be ended in order."""

from __future__ import annotations

import signal


def end_at_once() -> None:
    """While modules are imported: a KeyboardInterrupt may come up within the import machinery, which prints it and goes
    on, so that a stack would start although its user had said no."""
    _set(signal.SIG_DFL)


def raise_interrupt() -> None:
    """From here on it is a KeyboardInterrupt, as Python has it: whoever has begun something ends it."""
    _set(signal.default_int_handler)


def _set(handler: signal._HANDLER) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, handler)
