"""`baton up`: runs a stack in this terminal, or in the background."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time

from rich.console import Console

from deploy.cli.errors import CommandError
from deploy.cli.gateway_http import wait_until_ready
from deploy.cli.log_lines import parsed
from deploy.cli.logs import for_people
from deploy.cli.up_display import follow
from deploy.supervisor.gateway_port import PortTaken
from deploy.supervisor.nats_server import NoNatsServer
from deploy.supervisor.redis_server import NoRedisServer
from deploy.supervisor.spec import StackSpec
from deploy.supervisor.stack import Stack, StartFailed
from deploy.supervisor.state_file import StackRunning
from shared.bus import BusError
from shared.ids import InstanceId

QUESTION = "What is the capital of France?"
FIRST_ANSWER_DEADLINE = 30.0


def run_stack(spec: StackSpec, ready_fd: int | None = None) -> None:
    """Returns when the stack has ended in order. Raises CommandError.

    A byte on `ready_fd` tells whoever started this in the background that the stack is up.
    """
    begun = time.monotonic()
    console = Console(stderr=False)
    try:
        asyncio.run(_run(spec, console, begun, ready_fd))
    except StackRunning:
        raise CommandError(
            f"stack {spec.name!r} runs already (baton ps, baton down); a second one needs --name and --port"
        ) from None
    except StartFailed as error:
        raise CommandError(_last_words(error)) from None
    except (NoNatsServer, NoRedisServer, PortTaken, BusError, OSError) as error:
        raise CommandError(str(error)) from None


def _last_words(failed: StartFailed) -> str:
    """The last lines of the log, as `baton logs` shows them."""
    lines = (parsed(failed.instance, line, "") for line in failed.last_lines)
    shown = (line.text if line.fields is None else for_people(line, False) for line in lines)
    return "\n".join([failed.heading, *(f"  {line}" for line in shown)])


async def _run(spec: StackSpec, console: Console, begun: float, ready_fd: int | None) -> None:
    stack = Stack(spec)

    async def show() -> None:
        with contextlib.suppress(OSError):  # the terminal may go away; the stack does not hang on it
            await follow(stack, console)
            if stack.phase == "ready":
                await _greet(stack, console, begun, ready_fd)
            await stack.stop_asked.wait()
            console.print("\nDraining and stopping … (Ctrl-C again: faster)", style="dim")

    console.print(f"Starting stack [bold]{spec.name}[/bold] with {spec.model}", highlight=False, soft_wrap=True)
    await stack.run(beside=(show,))
    with contextlib.suppress(OSError):
        console.print("Stopped.", style="dim")


async def _greet(stack: Stack, console: Console, begun: float, ready_fd: int | None) -> None:
    if not stack.spec.counts.leads:
        assert stack.spec.hosts is not None
        console.print(f"\n[green]Joined[/green] {stack.spec.hosts.master}: its ranks here are ready", highlight=False)
        if ready_fd is not None:
            os.write(ready_fd, b"!")
        return
    if not await wait_until_ready(stack.url, FIRST_ANSWER_DEADLINE):
        gateway = InstanceId("gateway-1")
        stack.give_up(gateway, f"is up, but {stack.url}/ready did not say 200 within {FIRST_ANSWER_DEADLINE:g} s")
        return
    _say_ready(stack, console, time.monotonic() - begun)
    if ready_fd is not None:
        os.write(ready_fd, b"!")


def _say_ready(stack: Stack, console: Console, seconds: float) -> None:
    console.print(
        f"\n[green]Ready[/green] after {seconds:.1f} s: [bold]{stack.url}[/bold]"
        f"  model {stack.spec.served_model_name}\n",
        highlight=False,
        soft_wrap=True,
    )
    console.print(curl_line(stack), markup=False, highlight=False, soft_wrap=True)
    if console.is_terminal:
        console.print("\nStop with Ctrl-C. In another terminal: baton chat, baton ps, baton logs", style="dim")


def curl_line(stack: Stack) -> str:
    """A question to copy into a shell."""
    body = {"model": stack.spec.served_model_name, "messages": [{"role": "user", "content": QUESTION}]}
    key = ' -H "Authorization: Bearer $BATON_API_KEY"' if stack.spec.api_keys else ""
    quoted = json.dumps(body).replace("'", "'\\''")
    return f"curl {stack.url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n  -d '{quoted}'"
