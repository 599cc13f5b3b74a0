"""Fixtures that every kind of test may use."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import numpy as np
import pytest

from shared.bus import Bus
from shared.bus.memory_bus import MemoryBus
from shared.bus.nats_connection import NatsOptions, connect
from tests.support.cluster.nats_server import NatsServer, nats_server
from tests.support.cluster.stall_proof_clock import StallProofClock
from tests.support.lanes.compiled_tests import compile_missing, keep_constants
from tests.support.left_out import FOLDERS, LeftOutReport
from tests.support.worker.broken_devices import end_if_broken, show_errors

# Hundreds of processes of ours are started: none shall compile what another has compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# How fast a machine is just now is no property of the code, and what one change is judged by are the examples that any
# other is: `make test-slow` and --hypothesis-profile=search look for new ones.
_UNTIMED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("same", **_UNTIMED, derandomize=True)
hypothesis.settings.register_profile("search", **_UNTIMED)
hypothesis.settings.load_profile("same")
HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    # Triton's kernels run in its interpreter; it must be told before they are imported.
    os.environ["TRITON_INTERPRET"] = "1"


MOST_PROCESSES = 4
"""Each starts whole stacks, and has hundreds of MB of libraries."""
LONGEST_FIRST = (
    "tests/unit/worker/ops/triton/test_kernels_compile.py",
    "tests/faults/test_chaos.py",
    "tests/integration/cluster/test_cache_kinds_handed_over.py",
    "tests/integration/cluster/test_features_together.py",
    "tests/faults/test_data_parallel.py",
    "tests/faults/test_colocation.py",
    "tests/integration/worker/test_model_features.py",
    "tests/integration/",
    "tests/faults/",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """How many processes run tests: two more than there are cores, as many tests wait; only one where there is a GPU,
    whose memory they would share."""
    return 1 if HAS_GPU else min((os.cpu_count() or 1) + 2, MOST_PROCESSES)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    compile_missing(config)
    keep_constants()
    if not HAS_GPU:
        from tests.support.lanes.forked_workers import fork_workers

        fork_workers(config, specs)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files that share stacks go to one process."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.support.lanes.shared_stacks import SharedStackScheduling

    return SharedStackScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LeftOutReport(), "left-out-report")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected, 1.6 million objects, stays: the garbage collector need not look through it,
    neither meanwhile, when it would take a third of the time, nor in any test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes share the files (`make test`), none shall be left alone with a long one at the end."""
    for item in items:
        for marker, folders in FOLDERS.items():
            if item.nodeid.startswith(folders):
                item.add_marker(marker)
    items.sort(key=lambda item: [not item.nodeid.startswith(prefix) for prefix in LONGEST_FIRST])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws depends on no other test, nor on the process that runs it."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    show_errors()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    end_if_broken(report, None if call.excinfo is None else call.excinfo.value)
    return report


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Ctrl-C works in tests and what they start, even where a shell in the background has it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One real nats-server for the whole run; tests that kill theirs start their own."""
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[NatsServer]:
    """A real nats-server of the test's own, to be killed and restarted at will."""
    with nats_server(tmp_path) as server:
        yield server


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """This user has no home, as one of a container whose uid no /etc/passwd knows."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for variable in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


@pytest.fixture
async def memory_bus() -> AsyncIterator[MemoryBus]:
    """Nobody on it falls silent because the machine is busy with something else."""
    bus = MemoryBus()
    bus.liveness_now = StallProofClock()  # type: ignore[method-assign]
    yield bus
    await bus.close()


@pytest.fixture(params=["memory", "nats"])
async def any_bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    """Both buses in turn: what holds for one must hold for the other. The namespace is the test's own."""
    bus: Bus
    if request.param == "memory":
        bus = MemoryBus(max_payload=2**20)
        yield bus
        await bus.close()
    else:
        with nats_server(tmp_path, max_payload=2**20) as server:
            bus = await connect(NatsOptions(servers=(server.url,)))
            yield bus
            await bus.close()
