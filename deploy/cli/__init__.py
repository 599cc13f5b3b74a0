"""The `baton` command: starts a stack on this machine, talks to it, operates it."""

from deploy.cli.app import main

__all__ = ["main"]
