"""Scaling through Kubernetes' API: over real HTTP, against a server that records every call."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import pytest

from deploy.cli.plan import LauncherScaler
from deploy.errors import CommandError
from deploy.launchers import PoolChange
from deploy.launchers.kubernetes_api import kubernetes_api
from deploy.launchers.kubernetes_launcher import CHANGE_PATIENCE, KubernetesLauncher
from shared.bus.memory_bus import MemoryBus
from tests.actors.planner.test_fleet_actor import Fleet, decided
from tests.support.cluster.ports import free_port
from tests.support.kubernetes.api_server import Call, RecordingApiServer, Refusal, recording_api_server

SCALE = "statefulsets/engine/scale"
GROUPS = "leaderworkersets/engine"
NO_GROUPS = Call("GET", f"{GROUPS}/scale")
"""Asked for once: a cluster with engines of several pods runs them as that."""
DEADLINE = 60.0
THROTTLED = Refusal(429, "too many requests", {"Retry-After": "7"})


@pytest.fixture
async def server() -> AsyncIterator[RecordingApiServer]:
    async with recording_api_server() as running:
        yield running


class Sleeper:
    """A clock that only pauses move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


@pytest.fixture
def sleeper() -> Sleeper:
    return Sleeper()


@pytest.fixture
async def launcher(server: RecordingApiServer, sleeper: Sleeper) -> AsyncIterator[KubernetesLauncher]:
    async with kubernetes_api(server.url, "baton") as api:
        yield KubernetesLauncher(api, clock=lambda: sleeper.now, sleep=sleeper.sleep)


async def test_a_size_is_written_once_and_only_where_it_changes(
    launcher: KubernetesLauncher, server: RecordingApiServer
) -> None:
    assert await launcher.scale("engines", 3) == PoolChange(("engine-1", "engine-2"), ())
    assert server.calls == [NO_GROUPS, Call("GET", SCALE), Call("PUT", SCALE)]
    assert await launcher.scale("engines", 3) == PoolChange((), ())
    assert await launcher.scale("engines", 0) == PoolChange((), ("engine-0", "engine-1", "engine-2"))
    assert await launcher.scale("engines", 1) == PoolChange(("engine-0",), ())
    assert await launcher.scale("tokenizer", 5) == PoolChange(("3 of tokenizer",), ())
    assert (server.writes, server.replicas(), server.replicas("deployments/tokenizer")) == (4, 1, 5)


async def test_engines_that_decode_are_those_of_the_base(
    launcher: KubernetesLauncher, server: RecordingApiServer
) -> None:
    assert await launcher.scale("prefill", 2) == PoolChange(("prefill-1",), ())
    assert await launcher.scale("decode", 3) == PoolChange(("engine-1", "engine-2"), ())
    assert (server.replicas("statefulsets/prefill"), server.replicas()) == (2, 3)


async def test_a_conflict_is_settled_by_reading_again(
    launcher: KubernetesLauncher, server: RecordingApiServer, sleeper: Sleeper
) -> None:
    server.written_by_others = 2
    assert await launcher.scale("engines", 4) == PoolChange(("engine-1", "engine-2", "engine-3"), ())
    assert server.calls == [NO_GROUPS, *[Call("GET", SCALE), Call("PUT", SCALE)] * 3]
    assert server.replicas() == 4
    assert len(sleeper.pauses) == 2
    assert 0.25 <= sleeper.pauses[0] <= 0.5 <= sleeper.pauses[1] <= 1.0


async def test_a_server_that_throttles_is_left_alone_for_as_long_as_it_wants(
    launcher: KubernetesLauncher, server: RecordingApiServer, sleeper: Sleeper
) -> None:
    server.refusals = [THROTTLED] * 3
    await launcher.scale("engines", 2)
    assert sleeper.pauses == [7.0] * 3
    assert (len(server.calls), server.writes) == (6, 1)


async def test_a_server_that_throttles_for_too_long_is_given_up(
    launcher: KubernetesLauncher, server: RecordingApiServer, sleeper: Sleeper
) -> None:
    server.refusals = [THROTTLED] * 100
    with pytest.raises(CommandError, match=r"within 60 s: 429: too many requests"):
        await launcher.scale("engines", 2)
    assert sleeper.now <= CHANGE_PATIENCE
    assert min(sleeper.pauses) >= 7.0
    assert len(server.calls) == len(sleeper.pauses) + 1 <= 9
    assert server.writes == 0


async def test_a_server_that_is_gone_is_asked_less_and_less_and_then_given_up(sleeper: Sleeper) -> None:
    async with kubernetes_api(f"http://127.0.0.1:{free_port()}", "baton") as api:
        launcher = KubernetesLauncher(api, clock=lambda: sleeper.now, sleep=sleeper.sleep)
        with pytest.raises(CommandError, match="within 60 s: Cannot connect"):
            await launcher.scale("engines", 2)
    assert sleeper.now <= CHANGE_PATIENCE
    assert len(sleeper.pauses) <= 10
    assert sleeper.pauses[-1] > 8 * sleeper.pauses[0]


@pytest.mark.parametrize("status", [403, 404, 422])
async def test_a_refusal_is_told_at_once_in_the_servers_words(
    launcher: KubernetesLauncher, server: RecordingApiServer, sleeper: Sleeper, status: int
) -> None:
    server.refusals = [Refusal(status, 'statefulsets.apps "engine" is forbidden')] * 2
    with pytest.raises(CommandError, match=f'{status}: statefulsets.apps "engine" is forbidden'):
        await launcher.scale("engines", 2)
    assert (len(server.calls), sleeper.pauses) == (1 if status == 422 else 2, [])


async def test_what_kubernetes_does_not_run_is_refused(
    launcher: KubernetesLauncher, server: RecordingApiServer
) -> None:
    with pytest.raises(CommandError, match="kvstore: not on Kubernetes; engines, prefill, decode, gateway, tokenizer"):
        await launcher.scale("kvstore", 2)
    assert server.calls == []


async def test_who_waits_listens_and_asks_again_only_where_the_server_ends_it(
    launcher: KubernetesLauncher, server: RecordingApiServer, sleeper: Sleeper
) -> None:
    await launcher.scale("engines", 3)
    server.calls.clear()
    async with asyncio.timeout(DEADLINE):
        waiting = asyncio.create_task(launcher.wait_until_ready("engines", 3, DEADLINE))
        await server.watching.wait()
        server.make_ready(2)
        server.end_watches()
        await server.watching.wait()
        server.forget()
        await server.watching.wait()
        server.make_ready(3)
        await waiting
    listening = [Call("GET", "statefulsets/engine"), Call("GET", "statefulsets?watch")]
    assert server.calls == listening * 3
    assert len(sleeper.pauses) == 2
    server.calls.clear()
    await launcher.wait_until_ready("engines", 3, DEADLINE)
    assert server.calls == [Call("GET", "statefulsets/engine")]


async def test_engines_of_several_pods_are_scaled_as_groups(sleeper: Sleeper) -> None:
    """The StatefulSet of the same name holds their leaders, and is left to its controller."""
    async with recording_api_server(groups=True) as server, kubernetes_api(server.url, "baton") as api:
        launcher = KubernetesLauncher(api, clock=lambda: sleeper.now, sleep=sleeper.sleep)
        assert await launcher.scale("engines", 3) == PoolChange(("engine-1", "engine-2"), ())
        assert server.calls == [Call("GET", f"{GROUPS}/scale"), Call("PUT", f"{GROUPS}/scale")]
        assert (server.replicas(GROUPS), server.replicas()) == (3, 1)
        server.calls.clear()
        async with asyncio.timeout(DEADLINE):
            waiting = asyncio.create_task(launcher.wait_until_ready("engines", 3, DEADLINE))
            await server.watching.wait()
            server.make_ready(3, GROUPS)
            await waiting
        assert server.calls == [Call("GET", GROUPS), Call("GET", "leaderworkersets?watch")]
        server.refusals, server.written_by_others = [THROTTLED], 1
        assert await launcher.scale("engines", 1) == PoolChange((), ("engine-1", "engine-2"))
        assert (server.replicas(GROUPS), server.replicas()) == (1, 1)


async def test_waiting_has_an_end(launcher: KubernetesLauncher) -> None:
    with pytest.raises(CommandError, match=r"engines: 9 are not ready after 0\.2 s"):
        await launcher.wait_until_ready("engines", 9, 0.2)


async def test_a_planner_has_pods_started_and_a_server_that_refuses_changes_nothing(
    launcher: KubernetesLauncher, server: RecordingApiServer
) -> None:
    bus = MemoryBus()
    fleet = Fleet(bus)
    fleet.scaler = LauncherScaler(launcher)
    (pool,) = (await decided(fleet)).changes
    assert pool.target > 1
    assert (server.replicas(), server.calls) == (pool.target, [NO_GROUPS, Call("GET", SCALE), Call("PUT", SCALE)])
    server.refusals, fleet.now = [Refusal(403, "forbidden")], 0.0
    await decided(fleet)
    assert fleet.notes[-1].endswith("is refused: the Kubernetes API refuses this: 403: forbidden")
    assert server.replicas() == pool.target
    await bus.close()


async def baton_scale(*argv: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "deploy.cli",
        "scale",
        *argv,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(DEADLINE):
        out, error = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), error.decode()


async def test_baton_scale_writes_and_waits(server: RecordingApiServer) -> None:
    command = asyncio.create_task(baton_scale("engines=2", "--kubernetes", server.url, "--wait", "60", "--json"))
    async with asyncio.timeout(DEADLINE):
        await server.watching.wait()
    server.make_ready(2)
    status, out, error = await command
    assert (status, error) == (0, "")
    assert json.loads(out) == {"service": "engines", "started": ["engine-1"], "stopping": [], "superseded": []}
    assert (server.replicas(), server.writes, len(server.calls)) == (2, 1, 5)


async def test_baton_scale_refuses_what_has_no_meaning_there(server: RecordingApiServer) -> None:
    status, _, error = await baton_scale("engines=2", "--kubernetes", server.url, "--host", "gpu-1")
    assert (status, "--host: Kubernetes chooses hosts itself" in error) == (2, True)
    assert server.calls == []
