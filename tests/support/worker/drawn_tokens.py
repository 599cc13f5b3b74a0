"""What rows drew, in Python's own lists."""

from __future__ import annotations

from typing import NamedTuple

from services.worker.sampling.logprobs import logprobs_by_row
from services.worker.sampling.sampler import SamplerOutput
from shared.messages.generation import TokenLogprobs


class DrawnInLists(NamedTuple):
    tokens: list[int]
    logprobs: dict[int, TokenLogprobs]


def in_lists(drawn: SamplerOutput) -> DrawnInLists:
    here = drawn.on_host()
    return DrawnInLists(here.tokens.tolist(), logprobs_by_row(here.logprobs))
