"""A Ray cluster that loses its head takes the stack with it, and leaves no process behind."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.ray.conftest import RayMachines
from tests.support.cluster.stack import running_stack

END_SECONDS = 240
"""Ray's own patience with a head that is gone is a minute."""


@pytest.mark.timeout(600)
def test_a_stack_ends_with_the_head(machines: RayMachines, tmp_path: Path) -> None:
    more = ("--launcher=ray", f"--ray-address={machines.address}", "--orphan-timeout=10")
    with running_stack(tmp_path, kvstore="0", more=more) as stack:
        processes = [psutil.Process(member.pid) for member in stack.state.members if member.pid is not None]
        machines.cluster.lose_head()
        stack.supervisor.wait(END_SECONDS)
        _, left = psutil.wait_procs(processes, timeout=END_SECONDS)
        assert not left
