"""The tokens that sequences hold before a draw, as tensors on the logits' device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.crossing import sent

HeldTokens = NDArray[np.int32] | Tensor

History = Callable[[NDArray[np.intp], NDArray[np.int32]], tuple[HeldTokens, NDArray[np.int32], NDArray[np.int32]]]
"""Slots and output positions [P] → (tokens [P, longest], lengths [P], prompt lengths [P]) as they are before those
positions are drawn: a sequence may have several rows, each of which sees the drafts before it as drawn. Tokens that the
host does not know yet come as a tensor, on the logits' device."""

NO_TOKEN = -1
"""Stands before the output's first token; equals no token."""


@dataclass(frozen=True, slots=True)
class Held:
    """Of P rows."""

    tokens: Tensor
    """[P, longest] int64; what lies behind a row's length is not read."""
    lengths: Tensor
    """[P, 1] tokens of prompt and output."""
    prompt_lengths: Tensor
    """[P, 1]"""

    def last_output(self, count: int) -> Tensor:
        """[P, count] the newest output tokens, the last one at the end; NO_TOKEN where there are fewer."""
        place = self.lengths - count + torch.arange(count, device=self.tokens.device)
        tokens = self.tokens.gather(1, place.clamp(min=0))
        return torch.where(place >= self.prompt_lengths, tokens, NO_TOKEN)


def held(history: History, slots: NDArray[np.intp], positions: NDArray[np.int32], device: torch.device) -> Held:
    """What the rows hold that are about to draw the output tokens at `positions`."""
    tokens, lengths, prompts = history(slots, positions)
    there = tokens if isinstance(tokens, Tensor) else sent(tokens, device)
    columns = sent(np.stack((lengths, prompts), axis=1).astype(np.int64), device)
    return Held(there.long(), columns[:, :1], columns[:, 1:])
