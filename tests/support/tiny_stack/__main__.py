"""`python -m tests.support.tiny_stack SPEC.json`: the real supervisor over tiny services, in a process that can be
killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from deploy.supervisor.core.plan import ProcessSpec
from deploy.supervisor.launch import LaunchContext, flags, service_command
from deploy.supervisor.spec import StackSpec
from deploy.supervisor.stack import Stack
from deploy.supervisor.state_file import LOCK


def tiny_command(spec: StackSpec, process: ProcessSpec, where: LaunchContext) -> list[str]:
    """The coordinator is the real one: it needs no model, and operators talk to it."""
    if process.service == "coordinator":
        return service_command(spec, process, where)
    settings = {
        "instance": process.instance,
        "supervisor_lock": str(spec.run_dir / LOCK),
        "orphan_timeout": f"{spec.orphan_timeout:g}",
        "drain_timeout": f"{spec.drain_timeout:g}",
        "namespace": spec.namespace,
        "metrics_port": "none",
        **spec.settings.get(process.service, {}),
    }
    return [sys.executable, "-m", "tests.support.tiny_stack.service", process.service, *flags(settings)]


def main(path: str) -> None:
    spec = msgspec.json.decode(Path(path).read_bytes(), type=StackSpec, dec_hook=lambda type_, value: type_(value))
    asyncio.run(Stack(spec, tiny_command).run())


if __name__ == "__main__":
    main(sys.argv[1])
