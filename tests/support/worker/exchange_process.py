"""One of several ranks that exchange tensors: `exchange_process RANK RANKS RENDEZVOUS WHAT`, a module to run.

Prints a digest of all that it got, so that ranks can be compared; or how the exchange ended where another rank left.
"""

from __future__ import annotations

import hashlib
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from services.worker.distributed.host_memory import RankGone, RowRange
from services.worker.distributed.torch_ranks import RankTopology, TorchCommunicator, join
from services.worker.distributed.traffic import HOST_TRAFFIC
from services.worker.ops.native.native_exchange import BUFFER_BYTES, shared_exchange

SIZES = (0, 1, 15, 16, 17, 768, BUFFER_BYTES // 4, BUFFER_BYTES // 4 + 1, BUFFER_BYTES)
"""Elements: less than a lane, more than what one buffer holds."""
PATIENCE = timedelta(seconds=3)


def part(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """What a rank brings to an exchange."""
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * rank + size)).to(dtype)


def check(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected), (got.shape, got.dtype)


def in_order(parts: list[Tensor]) -> Tensor:
    """Their sum by the order of the ranks, in float, rounded once."""
    total = parts[0].float()
    for each in parts[1:]:
        total = total + each.float()
    return total.to(parts[0].dtype)


def exchange_rows(communicator: TorchCommunicator, rank: int, ranks: int, dtype: torch.dtype) -> None:
    """Each rank has some rows, the second one none, and the last one as many as the one before: they are one engine's.
    No more is sent and read than each needs of others."""
    exchange, width = communicator._exchange, 23
    assert exchange is not None
    for own in (1, 3, BUFFER_BYTES // 60):
        counts = [own + each if each != 1 else 0 for each in range(ranks - 1)]
        ends = [sum(counts[: each + 1]) for each in range(ranks - 1)]
        shares = [RowRange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        total, size = ends[-1], width * dtype.itemsize
        parts = [part(each, total * width, dtype).view(total, width) for each in range(ranks)]
        expected = torch.cat([parts[each][slice(*share)] for each, share in enumerate(shares)])
        gathered, before = parts[rank].clone(), traffic("all_gather")
        exchange.all_gather(gathered, [*shares, RowRange(0, 0)])
        check(gathered, expected)
        mine = counts[rank] if rank < ranks - 1 else 0
        assert traffic("all_gather", before) == (mine * size, (total - mine) * size)
        summed, before = parts[rank].clone(), traffic("reduce_scatter")
        exchange.reduce_scatter(summed, [*shares, shares[-1]])
        share = [*shares, shares[-1]][rank]
        check(summed[slice(*share)], in_order(parts)[slice(*share)])
        mine, shared = share.end - share.first, rank >= ranks - 2
        sent = total - (0 if shared else mine)
        assert traffic("reduce_scatter", before) == (sent * size, mine * (ranks - 1) * size)


def exchange_routed_rows(communicator: TorchCommunicator, rank: int, ranks: int, dtype: torch.dtype) -> None:
    """Shares as above; a row goes to some ranks, or to none, and nobody reads more than the rest of its own rows."""
    exchange, width = communicator._exchange, 23
    assert exchange is not None
    for own in (1, 3, BUFFER_BYTES // 60):
        ends = [own * (each + 1) for each in range(ranks - 1)]
        shares = [RowRange(end - own, end) for end in ends]
        total, chance = ends[-1], torch.Generator().manual_seed(own)
        goes = torch.rand(total, ranks, generator=chance) < 0.4
        sets = (goes * torch.tensor([1 << each for each in range(ranks)])).sum(1)
        rows = torch.randint(0, 256, (total, 40), generator=chance, dtype=torch.uint8)
        rows[:, :8] = sets.view(torch.uint8).view(total, 8)
        mine, theirs = goes[:, rank].clone(), torch.ones(total, dtype=torch.bool)
        x = torch.zeros_like(rows)
        if rank < ranks - 1:
            x[slice(*shares[rank])] = rows[slice(*shares[rank])]
            theirs[slice(*shares[rank])] = False
            mine[slice(*shares[rank])] = True
        before = traffic("dispatch")
        exchange.dispatch(x, [*shares, RowRange(0, 0)])()
        check(x[mine], rows[mine])
        check(x[:, :8], rows[:, :8])
        came = int((goes[:, rank] & theirs).sum())
        sent = own * 40 if rank < ranks - 1 else 0
        assert traffic("dispatch", before) == (sent, int(theirs.sum()) * 8 + came * 32)
        parts = [part(each, total * width, dtype).view(total, width) for each in range(ranks)]
        for each, given in enumerate(parts):
            given[~goes[:, each]] = 0
        whole = in_order(parts)
        x = torch.where(goes[:, rank : rank + 1], parts[rank], torch.nan)  # which nobody may read
        before, share = traffic("combine"), [*shares, shares[-1]][rank]
        exchange.combine(x, [*shares, shares[-1]], sets)
        check(x[slice(*share)], whole[slice(*share)])
        others = goes[slice(*share)].clone()
        others[:, rank] = False
        assert traffic("combine", before)[1] == int(others.sum()) * width * dtype.itemsize


def traffic(kind: str, before: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """What was sent and received since then."""
    sent, received = next(((each.sent, each.received) for each in HOST_TRAFFIC if each.kind == kind), (0, 0))
    return sent - before[0], received - before[1]


def exchange_all(communicator: TorchCommunicator, rank: int, ranks: int) -> str:
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        for size in SIZES:
            parts = [part(each, size, dtype) for each in range(ranks)]
            total = communicator.sum(parts[rank].clone())
            check(total, in_order(parts))
            digest.update(total.view(torch.uint8).numpy().tobytes())
            gathered = communicator.gather(parts[rank])
            assert len(gathered) == (0 if rank else ranks)
            for got, expected in zip(gathered, parts, strict=False):
                check(got, expected)
            check(communicator.broadcast(parts[rank].clone()), parts[0])
        exchange_rows(communicator, rank, ranks, dtype)
        exchange_routed_rows(communicator, rank, ranks, dtype)
    ids = torch.arange(5, dtype=torch.int32) + rank
    check(communicator.broadcast(ids), torch.arange(5, dtype=torch.int32))
    whole = communicator.sum(torch.tensor([rank + 1], dtype=torch.int64))  # not of a kind that memory is used for
    assert whole.item() == ranks * (ranks + 1) // 2
    return digest.hexdigest()


def main() -> None:
    rank, ranks, rendezvous, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    shared = None if what == "sockets" and rank == 1 else shared_exchange(ranks)
    assert shared is not None or what == "sockets"
    communicator = join(RankTopology(rank, ranks), rendezvous=rendezvous, timeout=PATIENCE, shared=shared).communicator
    if what == "sockets":
        print(communicator.sum(torch.ones(3)).tolist(), communicator.in_memory is not None, flush=True)
        os._exit(0)  # gloo's threads may abort a process that ends while they run
    assert communicator.in_memory is not None
    # Whoever makes the file has unlinked it before `join` returns, and all have said that they have it before that.
    assert communicator.minimum(rank) == 0
    assert not list(Path("/dev/shm").glob(f"baton-ranks-{os.getpid()}-*"))
    print(exchange_all(communicator, rank, ranks), flush=True)
    if rank == ranks - 1:
        if what == "silent":
            sys.stdin.read()  # until whoever started it has heard the others
        os._exit(0)
    try:
        communicator.sum(torch.ones(3))
    except RankGone as gone:
        print(gone, flush=True)
    os._exit(0)  # the others' end is no matter of gloo's


if __name__ == "__main__":
    main()
