"""Drawing one token for each row of logits, beside what one writes with torch: a sort, sums, and a draw."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.roofline.findings import Work
from services.worker.roofline.kernel_case import Call, Cases, KernelCase, Situation

_SHARPNESS = 4.0
"""Standard deviation of logits: a few tens of tokens have nine tenths of the chance."""


def sampling(situation: Situation) -> Cases:
    """Bytes: the logits, once. Chances are cut by top-k 50 and top-p 0.9, or not at all."""
    vocabulary = situation.config.vocab_size
    for rows in situation.rows:
        size = rows * vocabulary * situation.dtype.itemsize
        for name, top_k, top_p in (("all tokens", vocabulary, 1.0), ("top-k 50, top-p 0.9", 50, 0.9)):
            logits = [_SHARPNESS * situation.noise(rows, vocabulary) for _ in range(situation.copies(size))]
            yield KernelCase(
                f"{rows} rows of {vocabulary}, {name}",
                Work(size, 0.0),
                [_ours(each, top_k, top_p) for each in logits],
                [_by_torch(each, top_k, top_p) for each in logits],
                "torch sort and multinomial",
            )


def _ours(logits: Tensor, top_k: int, top_p: float) -> Call:
    from services.worker.kernels.sampling import Draw, draw  # Triton: only where a GPU is

    def filled(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((len(logits),), value, dtype=dtype, device=logits.device)

    how = Draw(filled(1.0), filled(top_k, torch.int64), filled(top_p), filled(0.0), filled(0.5, torch.float64))
    return lambda: draw(logits, how)


def _by_torch(logits: Tensor, top_k: int, top_p: float) -> Call:
    """Nothing is cut, and so nothing sorted, where all tokens stay."""
    if top_p == 1.0:
        return lambda: torch.multinomial(torch.softmax(logits.float(), dim=-1), 1)

    def drawn() -> Tensor:
        highest, tokens = torch.sort(logits.float(), dim=-1, descending=True)
        chances = torch.softmax(highest[:, :top_k], dim=-1)
        inside = torch.cumsum(chances, dim=-1) - chances < top_p
        return tokens.gather(1, torch.multinomial(chances * inside, 1))

    return drawn
