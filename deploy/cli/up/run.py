"""`baton up`: runs a stack in this terminal, or in the background."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO, cast

from deploy.cli.gateway_client import wait_until_ready
from deploy.cli.up.progress import Output, PlainOutput, RichOutput, follow
from deploy.errors import CommandError
from deploy.supervisor.adoption import StackDiffers
from deploy.supervisor.network import PortTaken
from deploy.supervisor.processes import RemoteProcesses
from deploy.supervisor.servers.nats import NatsServerUnavailable
from deploy.supervisor.servers.redis import RedisServerUnavailable
from deploy.supervisor.spec import StackSpec
from deploy.supervisor.stack import Stack, StartFailed
from deploy.supervisor.state_file import StackRunning
from deploy.supervisor.template.blanks import blank_processes
from deploy.supervisor.template.templates import TEMPLATES
from shared.bus import BusError
from shared.machine.equal_pages import offer_equal_pages
from shared.machine.file_pages import release_file_pages
from shared.models.audio_models import read_audio_model, read_sound_model
from shared.models.encoder_models import encoder_type, read_encoder_decoder

QUESTION = "What is the capital of France?"
FIRST_ANSWER_DEADLINE = 30.0


def run_stack(spec: StackSpec, ready_fd: int | None = None) -> None:
    """Returns when the stack has ended in order. Raises CommandError.

    Writes a byte to `ready_fd`, for the process that started this in the background, once the stack is ready.
    """
    begun = time.monotonic()
    file = cast(TextIO, LossyOutput(sys.stdout))
    output = RichOutput(file) if ready_fd is None else PlainOutput(file)
    try:
        if spec.ksm:
            _offer_equal_pages()
        with _remote_processes(spec) as remote, blank_processes(TEMPLATES if spec.forks else 0):
            asyncio.run(_run(Stack(spec, remote=remote), output, begun, ready_fd))
    except asyncio.CancelledError:  # by a signal, and everything is ended
        raise KeyboardInterrupt from None
    except StackRunning:
        raise CommandError(
            f"stack {spec.name!r} runs already (baton ps, baton down); a second one needs --name and --port"
        ) from None
    except StackDiffers as error:
        raise CommandError(str(error)) from None
    except StartFailed as error:
        raise CommandError(_last_words(error)) from None
    except (NatsServerUnavailable, RedisServerUnavailable, PortTaken, BusError, OSError) as error:
        raise CommandError(str(error)) from None
    finally:
        file.close()


def _offer_equal_pages() -> None:
    """Raises CommandError."""
    try:
        offer_equal_pages()
    except OSError as error:
        raise CommandError(f"--ksm: this kernel cannot merge equal pages ({error.strerror or error})") from None


class LossyOutput:
    """A text file that loses what cannot be written, as on a full disk or a terminal that went away: a stack goes on
    without its words."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """As if all of it were written."""
        with contextlib.suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """As if nothing were left to write."""
        with contextlib.suppress(OSError):
            self._file.flush()

    def close(self) -> None:
        """Flushes a last time. What cannot be written then is given up, or the interpreter would end with an error."""
        try:
            self._file.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked of it: whether it is a terminal, its encoding, its number."""
        return getattr(self._file, name)


def _last_words(failed: StartFailed) -> str:
    """The last lines of the log, as `baton logs` shows them."""
    from deploy.cli.logs import shown_lines  # with typer, 7 MiB that a stack which starts does without

    return "\n".join([failed.heading, *shown_lines(failed.instance, failed.last_lines)])


@contextlib.contextmanager
def _remote_processes(spec: StackSpec) -> Iterator[RemoteProcesses | None]:
    """What runs the stack's processes elsewhere; None: nothing does. Raises CommandError."""
    if spec.ray is None:
        yield None
        return
    from deploy.launchers.ray.cluster import ray_cluster
    from deploy.launchers.ray.processes import RayProcesses

    with ray_cluster(spec, spec.ray) as cluster:
        yield RayProcesses(spec, spec.ray, cluster)


async def _run(stack: Stack, output: Output, begun: float, ready_fd: int | None) -> None:
    spec = stack.spec

    async def show() -> None:
        await follow(stack, output)
        if stack.phase == "ready":
            with contextlib.suppress(OSError):  # who waits for `ready_fd` may have gone; the stack does not hang on it
                await _greet(stack, output, begun, ready_fd)
            release_file_pages()  # of 6 MiB of code that a start runs, TLS among it, 4 are not needed again
        await stack.stop_asked.wait()
        output.print("\nDraining and stopping … (Ctrl-C again: faster)", style="dim")

    models = ", ".join(str(each.model) for each in spec.models or (spec,))
    output.print(f"Starting stack [bold]{spec.name}[/bold] with {models}")
    await stack.run(beside=(show,))
    output.print("Stopped.", style="dim")


async def _greet(stack: Stack, output: Output, begun: float, ready_fd: int | None) -> None:
    if not stack.spec.counts.leads:
        assert stack.spec.hosts is not None
        output.print(f"\n[green]Joined[/green] {stack.spec.hosts.master}: its ranks here are ready")
        if ready_fd is not None:
            os.write(ready_fd, b"!")
        return
    joined = stack.spec.cluster.first if stack.spec.cluster is not None else None
    if joined is not None and not stack.spec.counts.gateway:
        output.print(f"\n[green]Joined[/green] {stack.spec.name} of {joined}: ready here")
        if ready_fd is not None:
            os.write(ready_fd, b"!")
        return
    wants_certificates = stack.spec.wants_certificates
    if not await wait_until_ready(stack.url, FIRST_ANSWER_DEADLINE, wants_certificates=wants_certificates):
        gateway = stack.spec.counts.named("gateway-1")
        stack.give_up(gateway, f"is up, but {stack.url}/ready did not say 200 within {FIRST_ANSWER_DEADLINE:g} s")
        return
    _say_ready(stack, output, time.monotonic() - begun)
    if ready_fd is not None:
        os.write(ready_fd, b"!")


def _say_ready(stack: Stack, output: Output, seconds: float) -> None:
    if stack.adopted:
        output.print(f"Took over {stack.adopted} processes that went on without their supervisor")
    output.print(
        f"\n[green]Ready[/green] after {seconds:.1f} s: [bold]{stack.url}[/bold]"
        f"  model {', '.join(stack.spec.names)}\n",
    )
    output.print(pages_line(stack), markup=False)
    output.print(curl_line(stack), markup=False)
    if stack.spec.cluster is not None and stack.spec.cluster.join_port is not None:
        output.print("Other hosts join with what this prints: baton token --print-join-command", style="dim")
    if isinstance(output, RichOutput) and output.console.is_terminal:
        output.print("\nStop with Ctrl-C. In another terminal: baton chat, baton ps, baton logs", style="dim")


def pages_line(stack: Stack) -> str:
    """Where people look."""
    pages = {"API": "/docs", "console": "/console", "metrics": "/metrics"}
    if stack.spec.settings.get("gateway", {}).get("console") == "false":
        del pages["console"]
    return "  ".join(f"{name} {stack.url}{path}" for name, path in pages.items()) + "\n"


def curl_line(stack: Stack) -> str:
    """A question to copy into a shell; what a model is asked that only writes down recordings, continues prompts, or
    makes vectors or labels of texts."""
    name = stack.spec.served_model_name
    needed = stack.spec.api_keys or "keys_file" in stack.spec.settings.get("gateway", {})
    key = ' -H "Authorization: Bearer $BATON_API_KEY"' if needed else ""
    sounds = read_sound_model(stack.spec.model)
    if read_audio_model(stack.spec.model) is not None or (sounds is not None and sounds.transcription is not None):
        return f"curl {stack.url}/v1/audio/transcriptions{key} -F file=@speech.mp3 -F model={shlex.quote(name)}"
    asked: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": QUESTION}]}
    path = "v1/chat/completions"
    if encoder_type(stack.spec.model) is not None:
        path, asked = "pooling", {"model": name, "input": QUESTION}
    elif read_encoder_decoder(stack.spec.model) is not None:
        path, asked = "v1/completions", {"model": name, "prompt": QUESTION, "max_tokens": 64}
    quoted = shlex.quote(json.dumps(asked))
    return f"curl {stack.url}/{path} -H 'Content-Type: application/json'{key} \\\n  -d {quoted}"
