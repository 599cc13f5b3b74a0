"""The `baton` command: starts a stack on this machine, talks to it, operates it."""

from deploy.cli.interrupts import end_at_once


def main() -> None:
    """Runs the command that was typed."""
    end_at_once()
    from deploy.cli.app import main as run

    run()


__all__ = ["main"]
