"""The `baton` command: starts a stack on this machine, talks to it, operates it."""

from __future__ import annotations

import signal

__all__ = ["end_at_once", "main", "raise_at_end", "raise_interrupt"]


def main() -> None:
    """Run the command that was typed."""
    end_at_once()
    leave_out_users_modules()
    from deploy.cli.app import main as run

    run()


def leave_out_users_modules() -> None:
    """Processes that are started as modules, `python -m`, would look for all others in the folder where the command was
    typed first: a user's `queue.py` or `shared/` there would be run in place of Python's or ours. In the checkout that
    this is of, whatever is there is ours."""
    from pathlib import Path

    from shared.config import default_environment

    try:
        is_ours = Path.cwd() == Path(__file__).resolve().parents[2]
    except OSError:  # the folder is gone
        is_ours = False
    if not is_ours:
        default_environment({"PYTHONSAFEPATH": "1"}, unless="PYTHONSAFEPATH")


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


def raise_at_end() -> None:
    """From here on what ends this process at once raises KeyboardInterrupt, too: a stack that is not ready yet has
    servers that are to be ended in order."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as of `nohup`
            signal.signal(number, signal.default_int_handler)
