"""Which processors a rank is bound to, on machines as sysfs shows them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from services.worker.backend import BackendError
from services.worker.config import WorkerConfig
from services.worker.distributed import binding
from services.worker.distributed.binding import (
    BindingError,
    Rank,
    bind_memory,
    chosen_cpus,
    cpus_of_gpu,
    cpus_of_rank,
    cpus_of_share,
)
from services.worker.executor import backend_choice
from services.worker.executor.backend_choice import make_backend, platform_of
from shared.machine.memory_policy import MemoryPolicy
from shared.machine.numa import Cpus, allowed_cpus
from tests.support.machine_trees import ONE_NODE, TWO_SOCKETS, WITH_CXL, write_machine
from tests.support.paths import DEMO_MODEL

ALL = frozenset(range(16))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two sockets of four cores with two threads each: core c has the processors c and c + 8. Four GPUs."""
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
        _write(tmp_path / f"devices/system/node/node{node}/cpulist", cpus)
    for cpu in ALL:
        _write(tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 8},{cpu % 8 + 8}")
    for gpu, cpus in zip(GPUS, ("0-3,8-11", "0-3,8-11", "4-7,12-15", "4-7,12-15"), strict=True):
        _write(tmp_path / "bus/pci/devices" / gpu / "local_cpulist", cpus)
    return tmp_path


GPUS = ("0000:19:00.0", "0000:3b:00.0", "0000:9b:00.0", "0000:ab:00.0")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text + "\n")


def test_gpus_of_one_socket_share_its_cores_and_none_is_split(machine: Path) -> None:
    shares = [cpus_of_gpu(GPUS, index, ALL, machine) for index in range(4)]
    assert shares == [{0, 8, 1, 9}, {2, 10, 3, 11}, {4, 12, 5, 13}, {6, 14, 7, 15}]


def test_a_gpu_that_is_alone_on_its_socket_has_all_of_it(machine: Path) -> None:
    assert cpus_of_gpu(GPUS[1:3], 0, ALL, machine) == {0, 1, 2, 3, 8, 9, 10, 11}


def test_what_the_process_may_not_use_is_not_given_out(machine: Path) -> None:
    assert cpus_of_gpu(GPUS, 0, frozenset({1, 2, 3, 9}), machine) == {1, 9}
    assert cpus_of_gpu(GPUS, 0, frozenset({4, 5}), machine) is None, "a container without any of the near ones"


def test_a_gpu_that_the_system_says_nothing_of_binds_nothing(machine: Path) -> None:
    assert cpus_of_gpu(("0000:ff:00.0",), 0, ALL, machine) is None


def test_a_gpu_of_which_nothing_may_be_read_binds_nothing(machine: Path) -> None:
    hidden = machine / "bus/pci/devices" / GPUS[0] / "local_cpulist"
    hidden.unlink()
    hidden.mkdir()  # a root that runs tests may read everything else
    assert cpus_of_gpu(GPUS, 0, ALL, machine) is None


def test_more_gpus_than_cores_bind_nothing_where_no_core_is_left(machine: Path) -> None:
    assert cpus_of_gpu(GPUS, 0, frozenset({0}), machine) is None
    assert cpus_of_gpu(GPUS, 1, frozenset({0}), machine) == {0}


def test_ranks_on_processors_are_spread_over_the_memory_nodes(machine: Path) -> None:
    shares = [cpus_of_rank(Rank(rank, 4), ALL, machine) for rank in range(4)]
    assert shares == [{0, 8, 1, 9}, {2, 10, 3, 11}, {4, 12, 5, 13}, {6, 14, 7, 15}]
    assert cpus_of_rank(Rank(1, 2), ALL, machine) == {4, 5, 6, 7, 12, 13, 14, 15}


def test_an_only_rank_keeps_the_whole_machine(machine: Path) -> None:
    assert cpus_of_rank(Rank(0, 1), ALL, machine) is None
    assert cpus_of_rank(Rank(0, 2), frozenset(range(4)), machine) is None, "one node is allowed: nothing to choose"


def test_a_rank_has_the_share_that_the_supervisor_gave_it(machine: Path) -> None:
    assert cpus_of_share("1:0/1", ALL, machine) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert cpus_of_share("0:1/2", ALL, machine) == {2, 3, 10, 11}
    assert cpus_of_share("0,1:0/1", ALL, machine) == ALL
    assert cpus_of_share("1:0/1", frozenset(range(4)), machine) is None, "a container without that node"
    with pytest.raises(BindingError, match="numa_share = '0:2/2'"):
        cpus_of_share("0:2/2", ALL, machine)


def test_memory_comes_from_the_nodes_of_the_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[MemoryPolicy, list[int]]] = []
    monkeypatch.setattr(binding, "set_memory_policy", lambda policy, nodes: calls.append((policy, nodes)))
    two, cxl = write_machine(tmp_path / "two", TWO_SOCKETS), write_machine(tmp_path / "cxl", WITH_CXL)
    assert bind_memory(frozenset({0, 64}), strict=False, sysfs=two) == [0]
    assert bind_memory(frozenset(range(128)), strict=False, sysfs=two) == [0, 1]
    assert bind_memory(frozenset({32}), strict=True, sysfs=two) == [1]
    assert bind_memory(frozenset({50}), strict=False, sysfs=cxl) == [1]
    assert calls == [
        (MemoryPolicy.PREFERRED, [0]),
        (MemoryPolicy.INTERLEAVE, [0, 1]),
        (MemoryPolicy.BIND, [1]),
        (MemoryPolicy.PREFERRED, [1]),
    ]
    assert bind_memory(frozenset({0}), strict=True, sysfs=write_machine(tmp_path / "one", ONE_NODE)) == []
    assert len(calls) == 4, "on one node nothing is changed"


def test_a_list_of_processors_that_is_none_is_refused() -> None:
    with pytest.raises(BindingError, match="is no list of processors"):
        chosen_cpus("1-", ALL)


def test_a_list_beyond_what_is_allowed_is_refused() -> None:
    assert chosen_cpus("1,3", frozenset(range(4))) == {1, 3}
    for wrong in ("4", "0-4", ","):
        with pytest.raises(BindingError, match="some of the processors"):
            chosen_cpus(wrong, frozenset(range(4)))


def test_all_threads_of_the_process_are_bound_and_so_are_later_ones() -> None:
    cpus = allowed_cpus()
    assert cpus is not None
    only = min(cpus)
    script = f"""
import os, threading
from services.worker.distributed.binding import bind
stop = threading.Event()
early = threading.Thread(target=stop.wait); early.start()
bind(frozenset({{{only}}}))
late = threading.Thread(target=stop.wait); late.start()
assert len(os.listdir("/proc/self/task")) == 3
for thread in os.listdir("/proc/self/task"):
    assert os.sched_getaffinity(int(thread)) == {{{only}}}
stop.set()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def seen_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("number", "world_size", "count", "device"),
    [(0, 1, 1, "cuda:0"), (1, 1, 1, "cuda:0"), (3, 1, 2, "cuda:1"), (5, 2, 4, "cuda:1"), (7, 16, 8, "cuda:7")],
)
def test_engines_share_gpus_where_there_are_too_few(
    monkeypatch: pytest.MonkeyPatch, number: int, world_size: int, count: int, device: str
) -> None:
    config = WorkerConfig(
        model="m", engine="e", local_rank=number, world_size=world_size, device="cuda", rendezvous="127.0.0.1:1"
    )
    seen_gpus(monkeypatch, count)
    assert str(platform_of(config)) == device


def test_an_engine_with_more_ranks_than_there_are_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_gpus(monkeypatch, 2)
    config = WorkerConfig(model="m", engine="e", rank=2, world_size=3, device="cuda", rendezvous="127.0.0.1:1")
    with pytest.raises(BackendError, match="rank 2 has no device of its own: it is number 2 here, 2 are there"):
        platform_of(config)


def test_a_worker_says_which_processors_cannot_be_had() -> None:
    config = WorkerConfig(model=str(DEMO_MODEL), engine="e", device="cpu", bind="99999")
    with pytest.raises(BackendError, match="bind = 99999: auto, none or some of the processors"):
        make_backend(config)


def test_a_gpu_that_cannot_be_opened_is_named_with_what_cuda_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")

    seen_gpus(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "set_device", full)
    config = WorkerConfig(model=str(DEMO_MODEL), engine="e", device="cuda", local_rank=1, bind="none")
    with pytest.raises(BackendError, match=r"^cuda:1 cannot be used: CUDA error: out of memory$"):
        make_backend(config)


def test_a_system_that_binds_nobody_is_borne_with_unless_binding_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(cpus: Cpus) -> None:
        raise PermissionError(1, "Operation not permitted")

    one = frozenset({0})
    monkeypatch.setattr(backend_choice, "bind", refused)
    monkeypatch.setattr(backend_choice, "allowed_cpus", lambda: one)
    monkeypatch.setattr(backend_choice, "cpus_of_rank", lambda rank, allowed: one)
    config = WorkerConfig(model=str(DEMO_MODEL), engine="e", device="cpu", kv_memory=1 << 20, max_num_seqs=1)
    assert make_backend(config).device == "cpu"
    with pytest.raises(BackendError, match="bind = 0: Operation not permitted"):
        make_backend(replace(config, bind="0"))


def test_memory_that_cannot_be_bound_is_borne_with_unless_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(cpus: Cpus, *, strict: bool) -> list[int]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(backend_choice, "bind_memory", refused)
    monkeypatch.setattr(backend_choice, "bind", lambda cpus: None)
    monkeypatch.setattr(backend_choice, "cpus_of_share", lambda share, allowed: frozenset({0}))
    config = WorkerConfig(
        model=str(DEMO_MODEL), engine="e", device="cpu", kv_memory=1 << 20, max_num_seqs=1, numa_share="0:0/1"
    )
    assert make_backend(config).device == "cpu"
    assert make_backend(replace(config, numa="off")).device == "cpu"
    with pytest.raises(BackendError, match="numa = bind: Operation not permitted"):
        make_backend(replace(config, numa="bind"))
