"""Which drafts stand: a draft that the model would have drawn itself is kept, the first other one replaced.

The token of each position is drawn from the model's own distribution there, by the random number of that position, just
as without drafts; a draft stands where it is what was drawn. That is rejection sampling (Leviathan, Kalman, Matias,
arXiv:2211.17192; Chen et al., arXiv:2302.01318) for drafts that are certain, q = 1 at the draft x: it stands with
probability min(1, p(x) / q(x)) = p(x), and what replaces it has the distribution max(0, p - q), normed, which is p
without x. More than that: the same seed gives the same tokens with drafts and without, however many are tried and
wherever a stream is taken up again, which rejection by random numbers of its own would not.

A proposer with a distribution q of its own draws from it by the same random number. Its drafts then stand more often
than q's likeliest token would: always, where q = p.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


def standing(drawn: Int32s, drafts: Int32s, counts: Int32s) -> Int32s:
    """How many drafts of each sequence stand [Q].

    drawn [Q, K + 1]: what the model draws behind the known tokens, behind the first draft, and so on. drafts [Q, K],
    `counts` [Q] of each row.
    """
    right = (drawn[:, :-1] == drafts) & (np.arange(drafts.shape[1]) < counts[:, None])
    first_ones: Int32s = np.cumprod(right, axis=1).sum(axis=1).astype(np.int32)
    return first_ones
