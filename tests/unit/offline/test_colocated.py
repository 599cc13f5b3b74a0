"""The command line of a process of several services, and how it ends."""

from __future__ import annotations

import asyncio

import pytest

from services.offline.colocated.__main__ import SERVICES, ColocatedActors, read_configs
from shared.actor import ActorRuntime
from shared.config import ConfigError

ENGINE = ["--instance=engine-1"]
RANK = ["--instance=engine-1-rank0", "--model=/m", "--engine=engine-1"]
DETOKENIZER = ["--instance=d", "--model=/m"]
WHOLE = ["scheduler", *ENGINE, "worker", *RANK, "coordinator", "--instance=c", "detokenizer", *DETOKENIZER]


def test_each_service_has_its_own_settings() -> None:
    configs = read_configs(WHOLE, {"BATON_WORKER_NATS_USER": "worker", "BATON_NATS_USER": "scheduler"})
    assert (configs.scheduler.nats_user, configs.worker.nats_user) == ("scheduler", "worker")
    assert (configs.detokenizer.instance, configs.coordinator.instance) == ("d", "c")
    assert [topic.subject for topic in configs.local_topics()] == [
        "engine.engine-1.requests",
        "engine.engine-1.steps",
        "engine.engine-1.results",
        "detokenizer.d.tokens",
    ]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--instance=engine-1"], "a service is expected first"),
        (["gateway", "--port=1"], "gateway: a service is expected first"),
        (WHOLE[:2], "worker, coordinator, detokenizer: each of"),
        ([*WHOLE, "--threads=1"], "threads"),
        (
            ["worker", "--world-size=2", "--rank=0", "--rendezvous=/x", *RANK, *WHOLE[:2], *WHOLE[6:]],
            "world_size = 2: 1",
        ),
        (["worker", *RANK, "scheduler", "--instance=engine-7", *WHOLE[6:]], "engine = 'engine-1': 'engine-7' is in"),
    ],
)
def test_what_cannot_be_one_process_is_refused(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_configs(argv, {})


class Runtime(ActorRuntime):
    """Runs until it is stopped, and a moment longer, or until it is `over`."""

    def __init__(self, service: str, log: list[str]) -> None:
        self._service, self._log = service, log
        self.over = asyncio.Event()
        self.fails = False

    def stop(self) -> None:
        self._log.append(f"stop {self._service}")
        self.over.set()

    async def run(self) -> None:
        await self.over.wait()
        await asyncio.sleep(0.001)
        self._log.append(f"end {self._service}")
        if self.fails:
            raise RuntimeError("a bug")


IN_ORDER = [
    *("stop coordinator", "stop scheduler", "end coordinator", "end scheduler"),
    *("stop detokenizer", "end detokenizer", "stop worker", "end worker"),
]


async def test_actors_end_in_the_order_in_which_they_need_each_other() -> None:
    log: list[str] = []
    actors = ColocatedActors({service: Runtime(service, log) for service in SERVICES})
    running = asyncio.create_task(actors.run())
    await asyncio.sleep(0)
    actors.stop()
    await running
    assert log == IN_ORDER


@pytest.mark.parametrize("fails", [False, True])
async def test_one_that_ends_by_itself_takes_all_along(fails: bool) -> None:
    log: list[str] = []
    runtimes = {service: Runtime(service, log) for service in SERVICES}
    runtimes["worker"].fails = fails
    running = asyncio.create_task(ColocatedActors(runtimes).run())
    await asyncio.sleep(0)
    runtimes["worker"].over.set()
    await asyncio.wait([running])
    if fails:
        assert isinstance(running.exception(), ExceptionGroup)
    else:
        assert log == ["end worker", *IN_ORDER[:-1]]
