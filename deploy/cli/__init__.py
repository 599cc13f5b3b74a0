"""The `baton` command: starts a stack on this machine, talks to it, operates it."""

from __future__ import annotations

import signal

__all__ = ["end_at_once", "main", "raise_interrupt"]


def main() -> None:
    """Run the command that was typed."""
    end_at_once()
    from deploy.cli.app import main as run

    run()


def end_at_once() -> None:
    """While modules are imported: a KeyboardInterrupt may come up within the import machinery, which prints it and goes
    on, so that a stack would start although the user pressed Ctrl-C."""
    _set(signal.SIG_DFL)


def raise_interrupt() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, as by default, so that what was started can be ended in order."""
    _set(signal.default_int_handler)


def _set(handler: signal._HANDLER) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, handler)
