"""The ranks of an engine by torch.distributed: NCCL between GPUs, gloo between CPUs and for what is in main memory."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, TCPStore  # torch.distributed has them without types

from services.worker.distributed.all2all import All2AllBackend
from services.worker.distributed.communicator import Communicator, SingleRank
from services.worker.distributed.host_memory import HostExchange, SharedExchange, StageRank, share
from services.worker.distributed.lockstep import GroupTopology, Lockstep
from services.worker.distributed.row_exchange import RowExchange, row_exchange

RESOLVE_PAUSE = 1.0
"""Seconds between two questions for the address of a name."""
MAX_PENDING_SENDS = 2
"""Steps whose rows a stage may have sent and not been rid of; it waits then, as the stage behind is the slower one."""


class RankTopology(Struct, frozen=True):
    """Where a rank stands among those of its engine."""

    rank: int
    world_size: int
    stages: int = 1

    @property
    def stage_size(self) -> int:
        """Ranks of each stage."""
        return self.world_size // self.stages

    @property
    def stage(self) -> int:
        """The pipeline stage that this rank is of."""
        return self.rank // self.stage_size

    @property
    def in_stage(self) -> int:
        """Its number among the ranks of its stage."""
        return self.rank % self.stage_size

    def ranks_of(self, stage: int) -> list[int]:
        """The ranks of a stage."""
        return list(range(stage * self.stage_size, (stage + 1) * self.stage_size))

    def at(self, stage: int) -> int:
        """The rank at this place in another stage."""
        return stage * self.stage_size + self.in_stage


class EngineCommunicators(NamedTuple):
    """What connects a rank with the others of its engine."""

    communicator: TorchCommunicator
    pipeline: TorchPipeline


class GroupCommunicators(NamedTuple):
    """What connects a rank with the others of its data-parallel group."""

    communicator: Communicator
    """To those of the engine."""
    group: RankGroup


class GroupUnavailable(Exception):
    """The ranks of a data-parallel group cannot share memory; the text says what they need."""


def join(
    place: RankTopology,
    *,
    rendezvous: str,
    timeout: timedelta,
    backend: str = "gloo",
    shared: SharedExchange | None = None,
) -> EngineCommunicators:
    """Blocks until every rank has joined, at `file:///PATH` or `tcp://HOST:PORT`. A rank that dies makes the others'
    exchanges raise. `backend`: as torch.distributed has it; a GPU of NCCL's is current on this thread. `shared` is used
    where every rank of a stage has it, and they are on one host. Raises OSError where the first rank cannot have HOST's
    address and PORT, or PATH."""
    _meet(place, rendezvous, timeout, backend)
    # Every rank has to take part in the making of every group.
    groups = [dist.new_group(place.ranks_of(stage), timeout=timeout) for stage in range(place.stages)]
    group = groups[place.stage]
    exchange = _exchange_on_host(place, group, shared, timeout) if place.stage_size > 1 else None
    communicator = TorchCommunicator(place, group, exchange, capturable="nccl" in backend)
    return EngineCommunicators(communicator, TorchPipeline(place))


def _meet(place: RankTopology, rendezvous: str, timeout: timedelta, backend: str) -> None:
    """Blocks until every rank of `place` is there."""
    dist.init_process_group(
        backend,
        store=rendezvous_store(rendezvous, place, timeout),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )


def join_group(
    place: GroupTopology, *, rendezvous: str, timeout: timedelta, shared: SharedExchange | None
) -> GroupCommunicators:
    """Blocks until every rank of the data-parallel group has joined, as `join` does, on CPUs of one host. Raises
    GroupUnavailable where they do not share memory there, OSError as `join` does."""
    everybody = RankTopology(place.in_group, place.group_size)
    _meet(everybody, rendezvous, timeout, "gloo")
    exchange = _exchange_on_host(everybody, None, shared, timeout)
    if exchange is None:
        raise GroupUnavailable("the ranks need the C++ library, and room in /dev/shm of one host")
    own = RankTopology(place.rank, place.tp)
    communicator: Communicator = SingleRank()
    engines = [range(engine * place.tp, (engine + 1) * place.tp) for engine in range(place.engines)]
    groups = [dist.new_group(list(ranks), timeout=timeout) for ranks in engines] if place.tp > 1 else []
    if groups:
        engine = groups[place.engine]
        beside = _exchange_on_host(own, engine, shared, timeout)
        communicator = TorchCommunicator(own, engine, beside, first=place.first, everybody=engine)
    return GroupCommunicators(communicator, RankGroup(place, exchange))


def _exchange_on_host(
    place: RankTopology, group: dist.ProcessGroup | None, shared: SharedExchange | None, timeout: timedelta
) -> HostExchange | None:
    """Every rank of the stage has one, or none has."""

    def agree_on(value: bytes) -> list[bytes]:
        said = [b""] * place.stage_size
        dist.all_gather_object(said, value, group=group)
        return said

    size = 0 if shared is None else shared.memory_bytes
    memory = share(StageRank(place.in_stage, place.stage_size), size, agree_on, timeout)
    return None if memory is None or shared is None else shared.open(memory)


def rendezvous_store(rendezvous: str, place: RankTopology, timeout: timedelta) -> Store:
    """Where the ranks find each other's addresses: a file, which needs no port; or a server of the first rank's, which
    listens on that address alone. Left to itself torch listens on all, and its store takes anybody's word."""
    if rendezvous.startswith("file://"):
        files = FileStore(rendezvous.removeprefix("file://"), place.world_size)
        files.set_timeout(timeout)
        return files
    url = urlsplit(rendezvous)
    host, port = url.hostname or "", url.port or 0
    _await_name(host, port, time.monotonic() + timeout.total_seconds())
    listening = _listen(host, port) if place.rank == 0 else None
    return TCPStore(
        host, port, place.world_size, listening is not None, timeout, master_listen_fd=listening, multi_tenant=False
    )


def _await_name(host: str, port: int, deadline: float) -> None:
    """Returns once a name has an address: a pod's exists only some seconds after the pod itself. Raises OSError
    (gaierror) at `deadline`, of the monotonic clock."""
    while True:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror:
            if time.monotonic() + RESOLVE_PAUSE > deadline:
                raise
            time.sleep(RESOLVE_PAUSE)
        else:
            return


def _listen(host: str, port: int) -> int:
    """A descriptor, which the store closes."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        return server.detach()


class TorchCommunicator:
    """The `Communicator` over torch.distributed, or what is quicker on one host."""

    def __init__(
        self,
        place: RankTopology,
        group: dist.ProcessGroup | None,
        exchange: HostExchange | None = None,
        *,
        capturable: bool = False,
        first: int = 0,
        everybody: dist.ProcessGroup | None = None,
    ) -> None:
        """`exchange`: of the stage's ranks, for tensors that it takes. `capturable`: collectives are NCCL's, which can
        be part of a graph; others wait for the host. `first`: what torch.distributed calls the engine's first rank.
        `everybody`: all ranks of the engine; None: all that there are."""
        self.capturable = capturable
        self.rank = place.in_stage
        self.world_size = place.stage_size
        self._size = place.world_size
        self._everybody = everybody
        self._first = first + place.ranks_of(place.stage)[0]
        self._group = group
        self._exchange = exchange

    @property
    def in_memory(self) -> HostExchange | None:
        """See `Communicator.in_memory`."""
        return self._exchange

    def sum(self, x: Tensor) -> Tensor:
        """See `Communicator.sum`; `x` is overwritten."""
        if self.world_size == 1:
            return x
        if self._exchange is not None and self._exchange.takes(x):
            self._exchange.sum(x)
        else:
            dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """See `Communicator.gather`."""
        if self.world_size == 1:
            return [x]
        if self._exchange is not None and self._exchange.takes(x):
            return self._exchange.gather(x)
        parts = [torch.empty_like(x) for _ in range(self.world_size)] if self.rank == 0 else None
        dist.gather(x, parts, dst=self._first, group=self._group)
        return parts or []

    def broadcast(self, x: Tensor) -> Tensor:
        """See `Communicator.broadcast`."""
        if self.world_size == 1:
            return x
        if self._exchange is not None and x.device.type == "cpu":
            self._exchange.broadcast(x)
        else:
            dist.broadcast(x, src=self._first, group=self._group)
        return x

    def minimum(self, value: int) -> int:
        """The smallest `value` of all ranks of the engine."""
        smallest = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self._everybody)
        return int(smallest.item())

    def all_gather(self, value: str) -> list[str]:
        """The `value` of every rank of the engine, by rank."""
        said: list[str] = [""] * self._size
        dist.all_gather_object(said, value, group=self._everybody)
        return said

    def close(self) -> None:
        """Leaves all process groups."""
        if self._exchange is not None:
            self._exchange.close()
        dist.destroy_process_group()


class RankGroup:
    """Connects a rank with all ranks of its data-parallel group, which are processes of one host."""

    def __init__(self, place: GroupTopology, exchange: HostExchange) -> None:
        self.place = place
        self.lockstep = Lockstep(place, exchange.notifier, self._sum_over_ranks)
        self._exchange = exchange

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x` on every rank; may overwrite `x`. Raises RankGone."""
        if not self._exchange.takes(x):
            return self.sum(x.float()).to(x.dtype)
        self._exchange.sum(x)
        return x

    def row_exchange(self, backend: All2AllBackend) -> RowExchange:
        """How rows go to the ranks of their experts and back; all ranks must ask for the same."""
        return row_exchange(backend, self.place, self._exchange)

    def shared_row_exchange(self) -> RowExchange:
        """How rows go to all ranks and back where each rank has some of its engine's; `counts` are each rank's."""
        return row_exchange("auto", GroupTopology(self.place.in_group, self.place.group_size, 1, 0), self._exchange)

    def all_gather(self, value: str) -> list[str]:
        """The `value` of every rank of the group, in their order."""
        said: list[str] = [""] * self.place.group_size
        dist.all_gather_object(said, value)
        return said

    def _sum_over_ranks(self, numbers: Sequence[int]) -> Sequence[int]:
        sums = self.sum(torch.tensor(numbers, dtype=torch.float32))  # which has every whole number below 2 ** 24
        return [int(each) for each in sums.tolist()]


class _PendingSend(NamedTuple):
    work: dist.Work
    keeps: Tensor
    """Read until `work` is done."""


class _Outbox:
    """Owns what was sent and may not be taken yet: at most so many at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sent: deque[_PendingSend] = deque()

    def send(self, x: Tensor, to: int, tag: int) -> None:
        while len(self._sent) >= self._most:
            self._sent.popleft().work.wait()
        work = dist.isend(x, to, tag=tag)
        assert work is not None, "this rank is part of the group"
        self._sent.append(_PendingSend(work, x))


class TorchTokens:
    """The `ExpectedTokens` that arrive over torch.distributed."""

    def __init__(self, work: dist.Work, tokens: Tensor) -> None:
        self._work = work
        self._tokens = tokens

    def wait(self) -> Sequence[int]:
        """Blocks until the tokens are in main memory."""
        self._work.wait()
        tokens: list[int] = self._tokens.tolist()
        return tokens


class TorchPipeline:
    """See :class:`services.worker.distributed.communicator.Pipeline`.

    Rows go from device to device. Tokens go through main memory, where the sampler needs them anyway to answer: on
    NCCL's streams they would have to keep an order with the rows that come the other way.
    """

    def __init__(self, place: RankTopology) -> None:
        self.stage = place.stage
        self.stages = place.stages
        self._before = place.at(self.stage - 1) if self.stage else None
        self._behind = place.at(self.stage + 1) if self.stage + 1 < self.stages else None
        self._last = place.at(self.stages - 1)
        self._others = [place.at(stage) for stage in range(self.stages - 1)]
        self._rows = _Outbox(MAX_PENDING_SENDS)
        self._tokens = _Outbox(MAX_PENDING_SENDS * self.stages * self.stages)
        self._sent = self._received = self._tokens_exchanged = 0
        self._waited = 0.0

    def receive(self, into: Tensor) -> Tensor:
        """See `Pipeline.receive`; blocks on a CPU."""
        assert self._before is not None, "the first stage embeds"
        work = dist.irecv(into, self._before, tag=_tag(self._received, 0))
        assert work is not None, "this rank is part of the group"
        begun = time.perf_counter()
        work.wait()
        self._waited += time.perf_counter() - begun
        self._received += 1
        return into

    def take_waited(self) -> float:
        """NCCL lets the device wait, and the host go on: there it is 0."""
        waited, self._waited = self._waited, 0.0
        return waited

    def send(self, x: Tensor) -> None:
        """See `Pipeline.send`; waits where MAX_PENDING_SENDS are not received yet."""
        assert self._behind is not None, "the last stage has the head"
        self._rows.send(x, self._behind, _tag(self._sent, 0))
        self._sent += 1

    def send_tokens(self, tokens: Sequence[int]) -> None:
        """Sends what was drawn to all stages before this one, the last."""
        drawn = torch.tensor(tokens, dtype=torch.int32)
        for rank in self._others:
            self._tokens.send(drawn, rank, _tag(self._tokens_exchanged, 1))
        self._tokens_exchanged += 1

    def expect_tokens(self, count: int) -> TorchTokens:
        """The next `count` tokens that the last stage sends."""
        tokens = torch.empty(count, dtype=torch.int32)
        work = dist.irecv(tokens, self._last, tag=_tag(self._tokens_exchanged, 1))
        assert work is not None, "this rank is part of the group"
        self._tokens_exchanged += 1
        return TorchTokens(work, tokens)


def _tag(number: int, kind: int) -> int:
    """Tag of a gloo message between two ranks, unique among those in flight."""
    return number % (1 << 20) * 2 + kind
