"""A scheduler and a worker as processes of their own, over a real nats-server."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from shared import topics
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_connection import NatsOptions, connect
from shared.ids import EngineId
from shared.messages.detokenizer import NewTokens, TokenBatch
from shared.messages.gateway import GatewayMessage, RequestFailed, RequestRejected
from shared.messages.lifecycle import Lifecycle
from tests.support.cluster.nats_server import NatsServer
from tests.support.engines.checking_worker import DETOKENIZER, GATEWAY, generate
from tests.support.engines.engine_on_a_bus import make_model

ENGINE = EngineId("engine-1")
PROMPT = list(range(2, 22))


class Observer:
    """Everything the engine says, heard over NATS."""

    def __init__(self, bus: NatsBus, server: NatsServer) -> None:
        self.bus = bus
        self.server = server
        self.entries: list[NewTokens] = []
        self.final: list[RequestFailed | RequestRejected] = []
        self.phases: dict[str, str] = {}
        self.loads: dict[str, int] = {}

    async def listen(self) -> None:
        await self.bus.subscribe(topics.detokenizer_tokens(DETOKENIZER), self._tokens)
        await self.bus.subscribe(topics.gateway_inbox(GATEWAY), self._final)
        await self.bus.subscribe(topics.lifecycles(), self._life)
        await self.bus.flush()

    async def _tokens(self, batch: TokenBatch) -> None:
        self.entries += batch.entries

    async def _final(self, message: GatewayMessage) -> None:
        assert isinstance(message, RequestFailed | RequestRejected)
        self.final.append(message)

    async def _life(self, life: Lifecycle) -> None:
        self.phases[life.instance] = life.phase
        self.loads[life.instance] = life.load

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(60):
                while not condition():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"never happened: {what}") from None

    def finished(self) -> set[str]:
        return {f"{e.request}/{e.attempt}" for e in self.entries if e.finish}

    def spawn(self, service: str, instance: str, *flags: str) -> subprocess.Popen[bytes]:
        common = [f"--instance={instance}", f"--nats-url={self.server.url}", "--metrics-port=none"]
        return subprocess.Popen([sys.executable, "-m", f"services.{service}", *common, *flags])


@contextlib.asynccontextmanager
async def observed(server: NatsServer) -> AsyncIterator[Observer]:
    bus = await connect(NatsOptions(servers=(server.url,)))
    observer = Observer(bus, server)
    await observer.listen()
    try:
        yield observer
    finally:
        await bus.close()


async def test_an_engine_of_two_processes_serves_survives_a_killed_worker_and_stops(
    own_nats: NatsServer, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model")
    flags = [f"--model={model}", f"--engine={ENGINE}", "--served-model-name=m", "--device=sim", "--sim-step-ms=2"]
    async with observed(own_nats) as seen:
        scheduler = seen.spawn("scheduler", ENGINE, f"--engine={ENGINE}", "--world-size=1")
        worker = seen.spawn("worker", "rank-0", *flags)
        try:
            await seen.until(lambda: seen.phases.get(ENGINE) == "ready", "the engine is ready")
            for i in range(16):
                await seen.bus.publish(topics.engine_requests(ENGINE), generate(f"r{i}", PROMPT, max_tokens=40))
            await seen.until(lambda: len(seen.finished()) == 16, "all finish")

            await seen.bus.publish(topics.engine_requests(ENGINE), generate("long", PROMPT, max_tokens=480))
            await seen.until(lambda: any(e.request == "long" for e in seen.entries), "the first token")
            worker.kill()
            worker.wait(60)
            await seen.until(lambda: len(seen.final) == 1, "the request fails")
            await seen.until(lambda: seen.phases.get(ENGINE) == "starting", "the engine has no workers")
            worker = seen.spawn("worker", "rank-0", *flags)
            await seen.until(lambda: seen.phases.get(ENGINE) == "ready", "the engine is ready again")
            again = generate("long", PROMPT, attempt=2, max_tokens=20)
            await seen.bus.publish(topics.engine_requests(ENGINE), again)
            await seen.until(lambda: "long/2" in seen.finished(), "the second attempt finishes")
        finally:
            for process in (scheduler, worker):
                process.terminate()
            codes = [await asyncio.to_thread(process.wait, 60) for process in (scheduler, worker)]
        assert codes == [0, 0]
        await seen.until(lambda: set(seen.phases.values()) == {"stopped"}, "both say that they stopped")


def test_a_model_that_is_not_there_is_said_so_in_one_line(own_nats: NatsServer) -> None:
    command = [sys.executable, "-m", "services.worker", "--model=/nowhere", "--engine=e", "--device=sim"]
    done = subprocess.run(
        [*command, f"--nats-url={own_nats.url}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "/nowhere: no such directory" in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_restart_of_the_bus_leaves_no_request_without_an_end(own_nats: NatsServer, tmp_path: Path) -> None:
    """What the engine says meanwhile may be lost to us; but it must not hold a request for ever, and serve again."""
    model = make_model(tmp_path / "model")
    flags = [f"--model={model}", f"--engine={ENGINE}", "--served-model-name=m", "--device=sim", "--sim-step-ms=5"]
    async with observed(own_nats) as seen:
        scheduler = seen.spawn("scheduler", ENGINE, "--step-timeout-s=30")
        worker = seen.spawn("worker", "rank-0", *flags)
        try:
            await seen.until(lambda: seen.phases.get(ENGINE) == "ready", "the engine is ready")
            for i in range(16):
                await seen.bus.publish(topics.engine_requests(ENGINE), generate(f"r{i}", PROMPT, max_tokens=480))
            await seen.until(lambda: len({e.request for e in seen.entries}) == 16, "all run")
            own_nats.kill()
            seen.loads.clear()
            own_nats.start()
            await seen.until(lambda: ENGINE in seen.loads, "the engine is heard again")
            await seen.until(lambda: seen.loads.get(ENGINE) == 0, "the engine holds nothing")
            await seen.until(lambda: seen.phases.get(ENGINE) == "ready", "the engine is ready")
            await seen.bus.publish(topics.engine_requests(ENGINE), generate("after", PROMPT, max_tokens=5))
            await seen.until(lambda: "after/1" in seen.finished(), "a new request finishes")
            assert scheduler.poll() is None
            assert worker.poll() is None
        finally:
            for process in (scheduler, worker):
                process.terminate()
            for process in (scheduler, worker):
                await asyncio.to_thread(process.wait, 10)
