"""Kernels that there are on GPUs alone: masks upon logits, rejection of drafts, blocks between caches and a stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.worker.kernels.traffic import kv_block_bytes, mask_bytes, rejection_bytes, verification_bytes
from services.worker.ops import Tried as DraftsTried
from services.worker.roofline.findings import Work
from services.worker.roofline.kernel_case import Call, Cases, KernelCase, NothingHere, Situation
from services.worker.roofline.measured_rank import fill_with_noise
from services.worker.sampling.masks import only_allowed, words

if TYPE_CHECKING:
    from services.worker.kernels.kv_blocks import BlockCaches
    from services.worker.kernels.rejection import Tried

Caches = list[tuple[Tensor, Tensor]]

_DRAFTS = 3
_MOVED = (1, 16, 128)
"""Blocks that are gathered at once."""
_HELD = 256
"""Blocks of the caches that they are taken from."""


def on_gpus(cases: Callable[[Situation], Cases]) -> Callable[[Situation], Cases]:
    """Those cases, and a word where there is no GPU. (Triton is imported only where it is needed.)"""

    def guarded(situation: Situation) -> Cases:
        if situation.device.type != "cuda":
            raise NothingHere("there is a kernel of ours on GPUs alone")
        return cases(situation)

    return guarded


def masks(situation: Situation) -> Cases:
    """Nearly all tokens are forbidden. Bytes: a bit for each logit, and the logits, which are written."""
    from services.worker.kernels.bitmask import apply_bitmask

    vocabulary = situation.config.vocab_size
    for rows in situation.rows:
        size = mask_bytes(rows, vocabulary, situation.dtype.itemsize)
        logits = [situation.noise(rows, vocabulary) for _ in range(situation.copies(size))]
        bits = torch.zeros((rows, words(vocabulary)), dtype=torch.int32, device=situation.device)
        bits[:, 0] = 1
        numbers = torch.arange(rows, device=situation.device)

        def ours(each: Tensor, bits: Tensor = bits, numbers: Tensor = numbers) -> Call:
            return lambda: apply_bitmask(each, bits, numbers)

        def by_torch(each: Tensor, bits: Tensor = bits) -> Call:
            return lambda: only_allowed(each, bits)

        name, calls = f"{rows} rows of {vocabulary}", [ours(each) for each in logits]
        yield KernelCase(name, Work(size, 0.0), calls, [by_torch(each) for each in logits])


def verification(situation: Situation) -> Cases:
    """Every draft stands, of as many for each sequence."""
    from services.worker.kernels.verification import verify

    for sequences in situation.rows:
        rows = sequences * (_DRAFTS + 1)
        drawn = torch.arange(rows, device=situation.device) % 7
        ids = torch.zeros(rows, dtype=torch.int32, device=situation.device)
        ids[1:] = drawn[:-1]
        first = torch.arange(0, rows, _DRAFTS + 1, dtype=torch.int32, device=situation.device)
        tried = DraftsTried(drawn, ids, None, first, torch.full_like(first, _DRAFTS), _DRAFTS)
        name, work = f"{sequences} × {_DRAFTS} drafts", Work(verification_bytes(rows, sequences), 0.0)
        yield KernelCase(name, work, [partial(verify, tried)], [partial(situation.torch_ops.verify, tried)])


def rejection(situation: Situation) -> Cases:
    """No draft stands, so that one row of each of both distributions is read."""
    from services.worker.kernels.rejection import CHUNK, Tried, verify

    vocabulary, device = situation.config.vocab_size, situation.device
    for rows in situation.rows:
        size = rejection_bytes(rows, _DRAFTS, vocabulary, chunk=CHUNK, drawn=True)
        name, work = f"{rows} × {_DRAFTS} drafts of {vocabulary}", Work(size, 0.0)
        if 16 * rows * (_DRAFTS + 1) * vocabulary > situation.room:
            yield KernelCase(name, work, [], [])
            continue
        target = torch.softmax(torch.randn(rows, _DRAFTS + 1, vocabulary, device=device), dim=-1)
        drafting = torch.softmax(torch.randn(rows, _DRAFTS, vocabulary, device=device), dim=-1)
        # What drafts hold likely, and the model does not.
        drafts = (drafting - 9 * target[:, :_DRAFTS]).argmax(dim=-1).to(torch.int32)
        counts = torch.full((rows,), _DRAFTS, dtype=torch.int32, device=device)
        chances = torch.full((rows, _DRAFTS + 1), 0.999, dtype=torch.float64, device=device)
        tried = Tried(target, drafting, drafts, counts, chances)

        def call(tried: Tried = tried) -> object:
            return verify(tried)

        yield KernelCase(name, work, [call], [_rejection_by_torch(tried, drafting)])


def _rejection_by_torch(tried: Tried, drafting: Tensor) -> Call:
    drafts, accepts = tried.drafts.long().unsqueeze(2), tried.chances[:, :-1]
    behind = torch.zeros_like(drafting[:, :1])

    def verified() -> Tensor:
        p = tried.target[:, :-1].gather(2, drafts).squeeze(2)
        q = drafting.gather(2, drafts).squeeze(2)
        place = (accepts * q < p).cumprod(dim=1).sum(dim=1)[:, None, None].expand(-1, 1, tried.target.shape[2])
        minus = torch.cat((drafting, behind), dim=1).gather(1, place)
        return torch.multinomial((tried.target.gather(1, place) - minus).clamp_(min=0).squeeze(1), 1)

    return verified


def kv_blocks(situation: Situation) -> Cases:
    """Bytes: each block of all layers, read once and written once."""
    from services.worker.kernels.kv_blocks import BlockCaches

    config = situation.config
    caches = [situation.ours.allocate_kv(_HELD, config.num_kv_heads, config.head_dim) for _ in config.layers]
    for halves in caches:
        for cache in halves:
            fill_with_noise(cache)
    together, one = BlockCaches(caches), caches[0][0]
    for count in _MOVED:
        blocks = torch.randperm(_HELD)[:count].to(torch.int32).to(situation.device)
        shape = (count, config.num_kv_heads, len(caches), 2, *one.shape[2:])
        staged = torch.zeros(shape, dtype=one.dtype, device=one.device)
        size = kv_block_bytes(
            count,
            layers=len(caches),
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            cache_itemsize=one.dtype.itemsize,
        )
        for name, (ours, by_torch) in (
            ("gather", _gathers(together, caches, blocks, staged)),
            ("scatter", _scatters(together, caches, blocks, staged)),
        ):
            yield KernelCase(f"{name} {count} blocks", Work(size, 0.0), [ours], [by_torch], "torch, layer by layer")


def _gathers(together: BlockCaches, caches: Caches, blocks: Tensor, staged: Tensor) -> tuple[Call, Call]:
    """Our way and torch's."""
    numbers = blocks.long()

    def by_torch() -> None:
        for layer, halves in enumerate(caches):
            for half, cache in enumerate(halves):
                staged[:, :, layer, half] = cache.index_select(0, numbers)

    return lambda: together.gather(blocks, staged), by_torch


def _scatters(together: BlockCaches, caches: Caches, blocks: Tensor, staged: Tensor) -> tuple[Call, Call]:
    """Our way and torch's."""
    numbers = blocks.long()

    def by_torch() -> None:
        for layer, halves in enumerate(caches):
            for half, cache in enumerate(halves):
                cache.index_copy_(0, numbers, staged[:, :, layer, half])

    return lambda: together.scatter(blocks, staged), by_torch
