"""What packages with logits processors implement: all that they need to import (docs/plugins.md)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared.messages.generation import SamplingOptions


class ProcessorConfig(NamedTuple):
    """What a processor is made with."""

    vocab_size: int
    """Columns of the logits."""
    max_num_seqs: int
    """The most requests at once."""
    device: torch.device
    model: Path
    """The model's directory, where its tokenizer is, too."""


class ProcessorParams(NamedTuple):
    """What a request asks for."""

    extra_args: Mapping[str, Any]
    """The client's `vllm_xargs`: JSON values by name, with at least one of the processor's names."""
    sampling: SamplingOptions
    """Temperature, seed and so on."""


class MoveDirectionality(Enum):
    """What a move leaves behind, as in vLLM. Baton only makes moves of the first kind."""

    UNIDIRECTIONAL = auto()
    """One request moves to another index, and leaves none behind."""
    SWAP = auto()
    """Two requests change places."""


AddedRequest = tuple[int, ProcessorParams, Sequence[int], Sequence[int]]
"""(index, parameters, prompt tokens, output tokens). The last is a list that grows before each `apply`. It is not empty
where the request comes from another engine, comes back, or has drafts: state has to be made from it."""

MovedRequest = tuple[int, int, MoveDirectionality]
"""(from, to, kind)."""


class BatchUpdate(NamedTuple):
    """How the batch differs from that of the last `apply`; to be followed in the order removed, added, moved."""

    batch_size: int
    """Requests, and rows of logits, from now on."""
    removed: Sequence[int]
    """Indices that nobody takes the place of."""
    added: Sequence[AddedRequest]
    """Each takes the place of whoever was at its index."""
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Changes what is likely, for the requests whose `vllm_xargs` have one of its names: a row of logits for each.

    One object lives as long as the engine. It runs on the rank that samples, in its steps: what it computes delays
    every request of the engine, and a call that does not end is a hung step.
    """

    extra_args: tuple[str, ...]
    """The names in `vllm_xargs` that it reads."""

    @classmethod  # noqa: B027
    def validate_params(cls, params: ProcessorParams) -> None:
        """Raises ValueError for values that it does not take: the request is a 400 with that text."""

    @abstractmethod
    def __init__(self, config: ProcessorConfig) -> None: ...

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token is the same with it: then greedy requests do not come here."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each `apply`. None: the batch is the same as before."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """logits float32 [batch_size, vocab], -inf where `allowed_token_ids` or a grammar forbid a token → the same
        shape, without NaN and +inf; it may be overwritten."""
