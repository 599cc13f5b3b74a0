"""Ends a stack, with its supervisor or without one."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from msgspec.structs import replace

from deploy.errors import CommandError
from deploy.supervisor.adoption import end_strays, left_stack
from deploy.supervisor.background import stop_stack
from deploy.supervisor.network import PortTaken
from deploy.supervisor.servers.arenas import remove_leftovers
from deploy.supervisor.servers.nats import NatsServerUnavailable
from deploy.supervisor.servers.redis import RedisServerUnavailable
from deploy.supervisor.stack import Stack
from deploy.supervisor.state_file import StackRunning, held, is_held, read_state, remove_state
from shared.bus import BusError

TRIES = 5
"""How often it may be that a supervisor comes or dies meanwhile."""


def end_stack(run_dir: Path, *, now: bool) -> str | None:
    """Returns when nothing of the stack is left: what there was, for people, or None. Raises CommandError."""
    found = None
    for _ in range(TRIES):
        state = read_state(run_dir)
        if state is not None and is_held(run_dir):
            stop_stack(state, run_dir, now=now)
            found = f"Stack {state.name} stopped."
            continue
        if is_held(run_dir):
            raise CommandError("a stack is starting; once more, please")
        try:
            was_orphan = end_orphans(run_dir, now=now)
        except StackRunning:
            continue
        return was_orphan or found
    raise CommandError(f"supervisors come and go in {run_dir}; once more, please")


def end_orphans(run_dir: Path, *, now: bool) -> str | None:
    """Takes over what a killed supervisor left and ends it in order, at once with `now`; by force where that cannot be.
    What there was, or None. Raises StackRunning."""
    left = left_stack(run_dir)
    if left is not None:
        # A template would import PyTorch for nobody.
        stack = Stack(replace(left.state.spec, start_method="spawn"))
        with contextlib.suppress(  # then without order
            NatsServerUnavailable, RedisServerUnavailable, PortTaken, BusError, OSError, ExceptionGroup
        ):
            try:
                asyncio.run(stack.run(stops=2 if now else 1))
            except asyncio.CancelledError:  # by a signal, and everything is ended
                raise KeyboardInterrupt from None
    with held(run_dir):
        end_strays(run_dir)
        removed = remove_leftovers(run_dir)
        remove_state(run_dir)
    if left is not None:
        return f"Stack {left.state.name}, which was without a supervisor, stopped."
    return "No stack runs; what a killed one had left in shared memory is removed." if removed else None
