"""What rows drew, in Python's own lists."""

from __future__ import annotations

from typing import NamedTuple

from services.worker.sampling.logprobs import by_row
from services.worker.sampling.sampler import Drawn
from shared.messages.generation import TokenLogprobs


class DrawnInLists(NamedTuple):
    tokens: list[int]
    logprobs: dict[int, TokenLogprobs]


def in_lists(drawn: Drawn) -> DrawnInLists:
    here = drawn.on_host()
    return DrawnInLists(here.tokens.tolist(), by_row(here.told))
