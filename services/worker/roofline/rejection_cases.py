"""Verifying drafts by rejection sampling, beside the same written with torch's operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.worker.kernels.traffic import rejection_bytes
from services.worker.roofline.findings import Work
from services.worker.roofline.kernel_case import Call, Cases, KernelCase, NothingHere, Situation

if TYPE_CHECKING:
    from services.worker.kernels.verification import Tried

_DRAFTS = 3
_MOST_SEQUENCES = 256
"""Their probabilities are several whole vocabularies each."""


def rejection(situation: Situation) -> Cases:
    if situation.device.type != "cuda":
        raise NothingHere("on a CPU there is no kernel that verifies so")
    return rejection_cases(situation)


def rejection_cases(situation: Situation) -> Cases:
    """Bytes: one row of probabilities of the model's and of the drafts', for each sequence."""
    from services.worker.kernels.verification import CHUNK, verify  # Triton: only where a GPU is

    vocab = situation.config.vocab_size
    for sequences in (rows for rows in situation.rows if rows <= _MOST_SEQUENCES):
        tried = _tried(situation, sequences, vocab)

        def ours(tried: Tried = tried) -> object:
            return verify(tried)

        yield KernelCase(
            f"{sequences} sequences of {_DRAFTS} drafts",
            Work(rejection_bytes(sequences, _DRAFTS, vocab, chunk=CHUNK, drawn=True), 0.0),
            [ours],
            [_by_torch(tried)],
        )


def _tried(situation: Situation, sequences: int, vocab: int) -> Tried:
    from services.worker.kernels.verification import Tried

    device = situation.device
    target = torch.softmax(4 * situation.noise(sequences, _DRAFTS + 1, vocab).float(), dim=-1)
    drafting = torch.softmax(4 * situation.noise(sequences, _DRAFTS, vocab).float(), dim=-1)
    drafts = torch.multinomial(drafting.view(-1, vocab), 1).view(sequences, _DRAFTS)
    counts = torch.full((sequences,), _DRAFTS, dtype=torch.int32, device=device)
    chances = torch.rand((sequences, _DRAFTS + 1), dtype=torch.float64, device=device)
    return Tried(target, drafting, drafts.int(), counts, chances)


def _by_torch(tried: Tried) -> Call:
    drafting = tried.drafting
    assert drafting is not None
    drafts, accepts = tried.drafts.long().unsqueeze(2), tried.chances[:, :-1]
    behind = torch.zeros_like(drafting[:, :1])

    def verified() -> Tensor:
        p = tried.target[:, :-1].gather(2, drafts).squeeze(2)
        q = drafting.gather(2, drafts).squeeze(2)
        place = (accepts * q < p).cumprod(dim=1).sum(dim=1)[:, None, None].expand(-1, 1, tried.target.shape[2])
        q_row = torch.cat((drafting, behind), dim=1).gather(1, place)
        left = (tried.target.gather(1, place) - q_row).clamp_(min=0).squeeze(1)
        return torch.multinomial(left, 1)

    return verified
