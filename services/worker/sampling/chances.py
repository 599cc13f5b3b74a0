"""The random number of each row's output position, also where the host does not know which position that is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.worker.sampling.parameters import Choices
from services.worker.sampling.philox import uniforms


def numbers(choices: Choices, rows: NDArray[np.intp] | slice = slice(None)) -> NDArray[np.float64]:
    """What `chances` chooses from, to be sent: of each of `rows` one, or one for each position that may be meant."""
    seeds, positions = choices.table.seed[choices.slots[rows]], choices.position[rows]
    if choices.shortfall is None:
        return uniforms(seeds, positions)
    back = np.arange(choices.shortfall.most + 1, dtype=np.int32)
    return uniforms(np.repeat(seeds, len(back)), (positions[:, None] - back).ravel())


def chances(sent: Tensor, choices: Choices, rows: Tensor | None = None) -> Tensor:
    """[P] float64 in [0, 1) out of what `numbers` said, of `rows` [P]; None: of all."""
    short = choices.shortfall
    if short is None:
        return sent
    own = short if rows is None else short.of(rows)
    return sent.view(-1, short.most + 1).gather(1, own.tokens.long().unsqueeze(1)).squeeze(1)
