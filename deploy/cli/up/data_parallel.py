"""`--data-parallel-size`: how many engines that makes, and what the engines of a group cannot be yet."""

from __future__ import annotations

from deploy.errors import CommandError
from deploy.supervisor.settings import StackSettings


def engines_of_groups(size: int, stack: StackSettings, pp: int) -> int | None:
    """Engines of the stack: as many as were asked for, or one group of `size`; None: nobody said. Raises CommandError
    where they do not make whole groups, or cannot be in any."""
    if size == 1:
        return stack.engines
    option = f"--data-parallel-size {size}"
    for refused, given in (
        (f"--pp {pp}", pp > 1),
        (f"--prefill {stack.prefill}", stack.prefill),
        (f"--decode {stack.decode}", stack.decode),
        (f"--standby {stack.standby}", stack.standby),
        (f"--nodes {stack.nodes}", stack.nodes > 1),
        (f"--advertise-address {stack.advertise_address}", stack.advertise_address is not None),
        (f"--launcher {stack.launcher}", stack.launcher != "local"),
        ("--colocate", stack.colocate),
    ):
        if given:
            raise CommandError(f"{option}: its engines share experts on one host; not with {refused}", status=2)
    engines = size if stack.engines is None else stack.engines
    if not engines or engines % size:
        raise CommandError(f"--engines {engines}: whole groups are needed, of {option} engines each", status=2)
    return engines
