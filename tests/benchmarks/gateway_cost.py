"""What a streamed token costs the gateway: CPU of a real gateway process on real NATS with real sockets.

    python -m tests.benchmarks.gateway_cost --streams 64 --tokens 128 --step-ms 20

A ring in this process publishes one `Deltas` for all streams at each step, as a detokenizer does; clients in a process
of their own read and count. The pace leaves the gateway unsaturated, so that steps are not merged into one write.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from shared import topics
from shared.bus import Bus
from shared.bus.nats_connection import NatsOptions, connect
from shared.ids import GatewayId
from shared.messages.gateway import Delta, Deltas, RequestPlaced, StreamOpened
from shared.messages.tokenizer import Tokenize
from tests.support.cluster.nats_server import nats_server
from tests.support.cluster.ports import free_port
from tests.support.gateway.fake_services import DETOKENIZER, ENGINE, MODEL, FakeRing, word

GATEWAY = GatewayId("gateway-1")
BODY = b'{"model":"%b","messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":%d}'


class SteppingRing(FakeRing):
    """Owns the active requests; every step gives each a token, in one message."""

    def __init__(self, bus: Bus, step: float) -> None:
        super().__init__(bus, step)
        self._active: dict[str, tuple[Tokenize, int]] = {}
        self._step_number = 0

    async def _tokenize(self, message: Tokenize) -> None:
        await self.tell(message, RequestPlaced(message.request, message.attempt, ENGINE, DETOKENIZER))
        self._active[message.request] = (message, 0)

    async def all_there(self, streams: int) -> None:
        while len(self._active) < streams:
            await asyncio.sleep(0.01)

    async def run(self) -> None:
        """Steps until every stream has ended."""
        due = time.monotonic()
        while self._active:
            due += self.step
            await self.bus.publish(topics.gateway_inbox(GATEWAY), self._next_step())
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    def _next_step(self) -> Deltas:
        opened, deltas = [], []
        for request, (message, position) in list(self._active.items()):
            last = position + 1 == message.stopping.max_tokens
            if position == 0:
                opened.append(StreamOpened(message.request, message.attempt, 10, 0))
            finish = "length" if last else None
            text = word(position % 7)
            deltas.append(Delta(message.request, message.attempt, position, (position,), text, finish))  # type: ignore[arg-type]
            if last:
                del self._active[request]
            else:
                self._active[request] = (message, position + 1)
        number, self._step_number = self._step_number, self._step_number + 1
        return Deltas(
            detokenizer=DETOKENIZER,
            epoch=self.lives["detokenizer"],
            number=number,
            opened=tuple(opened),
            deltas=tuple(deltas),
        )


async def read_stream(port: int, tokens: int) -> int:
    """One client: bytes out, events counted, nothing parsed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = BODY % (MODEL.encode(), tokens)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    events, tail = 0, b""
    while not tail.endswith(b"0\r\n\r\n"):
        data = await reader.read(65536)
        if not data:
            break
        events += data.count(b"data: ")
        tail = (tail + data)[-5:]
    writer.close()
    return events


async def until_ready(port: int) -> None:
    async with asyncio.timeout(30):
        answer = b""
        while b" 200 " not in answer:
            await asyncio.sleep(0.05)
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                continue
            writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = await reader.read(1000)
            writer.close()


async def clients(port: int, streams: int, tokens: int) -> None:
    counts = await asyncio.gather(*(read_stream(port, tokens) for _ in range(streams)))
    wanted = tokens + 2  # the role, and [DONE]
    assert set(counts) == {wanted}, f"events per stream: {sorted(set(counts))}, not {wanted}"


def cpu_seconds(pid: int) -> tuple[float, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


async def measure(url: str, port: int, pid: int, streams: int, tokens: int, step: float) -> None:
    bus = await connect(NatsOptions(servers=(url,)))
    ring = SteppingRing(bus, step)
    await ring.start()
    await until_ready(port)
    program = [sys.executable, "-m", "tests.benchmarks.gateway_cost", "--client-port", str(port)]
    program += ["--streams", str(streams), "--tokens", str(tokens)]
    reader = await asyncio.create_subprocess_exec(*program)
    async with asyncio.timeout(30):
        await ring.all_there(streams)
    user, system = cpu_seconds(pid)
    began = time.monotonic()
    await ring.run()
    assert await reader.wait() == 0
    user, system = (after - before for after, before in zip(cpu_seconds(pid), (user, system), strict=True))
    wall, total = time.monotonic() - began, streams * tokens
    print(
        f"streams {streams:4d}  tokens {total:7d}  {total / wall:8.0f} tok/s  gateway CPU per token: "
        f"{1e6 * (user + system) / total:6.1f} µs (user {1e6 * user / total:.1f}, system {1e6 * system / total:.1f})  "
        f"busy {100 * (user + system) / wall:.0f}%"
    )
    await ring.stop()
    await bus.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--client-port", type=int)
    parser.add_argument("--gateway", default=sys.executable, help="command before -m services.gateway")
    arguments = parser.parse_args()
    if arguments.client_port is not None:
        uvloop.run(clients(arguments.client_port, arguments.streams, arguments.tokens))
        return
    with tempfile.TemporaryDirectory() as folder, nats_server(Path(folder)) as server:
        port = free_port()
        flags = ["--nats-url", server.url, "--port", str(port), "--instance", GATEWAY, "--log-level", "warning"]
        gateway = subprocess.Popen([*arguments.gateway.split(), "-m", "services.gateway", *flags])
        try:
            step = arguments.step_ms / 1000
            uvloop.run(measure(server.url, port, gateway.pid, arguments.streams, arguments.tokens, step))
        finally:
            gateway.send_signal(signal.SIGTERM)
            gateway.wait(timeout=10)


if __name__ == "__main__":
    main()
