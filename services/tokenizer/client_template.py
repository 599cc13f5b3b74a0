"""Renders a chat template that came with a request, in a process of its own with limits of its own.

jinja2's sandbox keeps a template from reaching the interpreter, but not from looping for ever or from doubling a
string until memory ends. Threads cannot be stopped, so such a template runs in a short-lived process that the kernel
limits (CPU seconds, address space; where the platform has no such limits, wall time alone) and that is killed when
it takes too long. Costs about 0.1 s a request, which only requests with a template of their own pay.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import msgspec

from services.tokenizer.core.chat_template import ChatTemplate
from services.tokenizer.core.refusal import PromptRefused
from shared.machine.helper_process import end_helper, start_helper
from shared.messages.tokenizer import ChatPrompt
from shared.packing import NOT_DECODED

MAX_TEMPLATE_CHARS = 65_536
CPU_TIMEOUT = 1
"""Seconds of CPU time, as the kernel counts them."""
WALL_TIMEOUT = 20.0
"""Far more than the CPU time: on a busy machine the process may wait for seconds before it begins."""
MAX_MEMORY = 256 * 2**20
"""Bytes of address space."""
MAX_OUTPUT = 16 * 2**20
"""Bytes of rendered text; the bus takes less."""
MAX_PROCESSES = 2


class ClientChat(msgspec.Struct, frozen=True):
    """A chat with a template of the client's own, on its way to the process that renders it."""

    prompt: ChatPrompt
    special_tokens: dict[str, str]


class RenderedChat(msgspec.Struct, frozen=True):
    """What that process answers: text, or the refusal's field and message."""

    text: str | None
    field: str | None = None
    message: str | None = None


class ClientTemplates:
    """Runs such processes, `MAX_PROCESSES` at a time; further chats wait."""

    def __init__(self) -> None:
        self._processes = asyncio.Semaphore(MAX_PROCESSES)

    async def render(self, prompt: ChatPrompt, special_tokens: dict[str, str]) -> str:
        """The prompt as text. Raises PromptRefused."""
        if len(prompt.template or "") > MAX_TEMPLATE_CHARS:
            raise PromptRefused("chat_template", f"chat_template: {MAX_TEMPLATE_CHARS} characters at most")
        request = msgspec.msgpack.encode(ClientChat(prompt, special_tokens))
        async with self._processes:
            output = await _run(request)
        try:
            rendered = msgspec.msgpack.decode(output, type=RenderedChat)
        except NOT_DECODED:
            raise PromptRefused(
                "chat_template",
                f"chat_template: not rendered within {CPU_TIMEOUT} s of CPU time and {MAX_MEMORY // 2**20} MiB",
            ) from None
        if rendered.text is None:
            raise PromptRefused(rendered.field or "chat_template", rendered.message or "chat_template: refused")
        return rendered.text


async def _run(request: bytes) -> bytes:
    """What the process wrote; cut or empty where it was killed."""
    process = await start_helper("-m", "services.tokenizer.client_template", stderr=asyncio.subprocess.DEVNULL)
    assert process.stdin is not None
    assert process.stdout is not None
    output = b""
    try:
        async with asyncio.timeout(WALL_TIMEOUT):
            with contextlib.suppress(ConnectionError):
                process.stdin.write(request)
                await process.stdin.drain()
                process.stdin.close()
            while len(output) <= MAX_OUTPUT and (chunk := await process.stdout.read(2**16)):
                output += chunk
    except TimeoutError:
        output = b""
    finally:
        await end_helper(process)
    return output if len(output) <= MAX_OUTPUT else b""


def _limit_this_process() -> None:
    try:
        import resource
    except ImportError:  # Windows has none; the wall time limits it
        return
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_TIMEOUT, CPU_TIMEOUT))
    with contextlib.suppress(OSError, ValueError):  # macOS knows the limit and takes none
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def main() -> None:
    """The child: one request on standard input, one answer on standard output."""
    _limit_this_process()
    chat = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ClientChat)
    try:
        template = ChatTemplate(chat.prompt.template or "")
        answer = RenderedChat(template.render(chat.prompt, chat.special_tokens))
    except PromptRefused as refused:
        answer = RenderedChat(None, refused.field, refused.message)
    except MemoryError:
        return
    sys.stdout.buffer.write(msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main()
