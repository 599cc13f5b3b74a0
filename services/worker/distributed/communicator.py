"""How the ranks of an engine exchange tensors: collectives within a stage, and what passes between pipeline stages.

The ranks of a stage share its layers by tensor parallelism; the stages form a pipeline (`models/sharding.py` says who
holds what). Rank 0 of the last stage alone draws the next tokens and sends them to the others. Drawing on every rank
would save that message, but then ranks on CPUs or GPUs of different kinds could draw different tokens, and no one would
notice.

Stages compute different plans at the same time. So nothing here waits for a later stage: what is sent is taken when
that stage comes to it, and tokens are awaited when a plan goes on with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from services.worker.distributed.host_memory import HostExchange


class Communicator(Protocol):
    """Collectives over the ranks of one stage; every rank calls them in the same order."""

    @property
    def rank(self) -> int:
        """Index of this rank within its stage."""

    @property
    def world_size(self) -> int:
        """Ranks of the stage."""

    @property
    def in_memory(self) -> HostExchange | None:
        """By which the ranks of the stage exchange tensors in memory of their host; None where they do not."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, on every rank; may overwrite `x`."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's `x` by rank, on rank 0; the others get an empty list."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's `x`, on every rank; overwrites `x`."""

    def minimum(self, value: int) -> int:
        """The smallest of the `value`s of every rank of the engine, all stages, on every rank."""

    def all_gather(self, value: str) -> list[str]:
        """The `value` of every rank of the engine, all stages, in the order of the ranks."""


class SingleRank:
    """A stage of one rank in an engine of one stage: nothing to exchange."""

    rank = 0
    world_size = 1
    in_memory: HostExchange | None = None

    def sum(self, x: Tensor) -> Tensor:
        """Returns `x` itself."""
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Returns `x` as the only part."""
        return [x]

    def broadcast(self, x: Tensor) -> Tensor:
        """Returns `x` itself."""
        return x

    def minimum(self, value: int) -> int:
        """Returns `value` itself."""
        return value

    def all_gather(self, value: str) -> list[str]:
        """Returns `value` as the only one."""
        return [value]


class ExpectedTokens(Protocol):
    """Tokens that the last stage is going to draw."""

    def wait(self) -> Sequence[int]:
        """Returns once they are here."""


class Pipeline(Protocol):
    """One rank's way to the ranks at its place in the other stages. Every rank of an engine computes the same steps in
    the same order, so messages need no names."""

    @property
    def stage(self) -> int:
        """The number of this rank's stage, from 0."""

    @property
    def stages(self) -> int:
        """How many stages the engine has."""

    def receive(self, into: Tensor) -> Tensor:
        """The next rows from the stage before, in the memory of `into`, which has their shape and dtype."""

    def take_waited(self) -> float:
        """Seconds that `receive` has waited since this was last asked."""

    def send(self, x: Tensor) -> None:
        """To the stage behind. Nobody may write to `x` any more."""

    def send_tokens(self, tokens: Sequence[int]) -> None:
        """Sends what was drawn from the last stage to all before it."""

    def expect_tokens(self, count: int) -> ExpectedTokens:
        """The next `count` tokens that the last stage sends; on all stages before it."""


class SingleStage:
    """An engine of one stage: there is nothing to exchange."""

    stage = 0
    stages = 1

    def receive(self, into: Tensor) -> Tensor:
        """Raises RuntimeError: there is no stage before."""
        raise RuntimeError("there is no stage before")

    def take_waited(self) -> float:
        """0: nothing is received."""
        return 0.0

    def send(self, x: Tensor) -> None:
        """Raises RuntimeError: there is no stage behind."""
        raise RuntimeError("there is no stage behind")

    def send_tokens(self, tokens: Sequence[int]) -> None:
        """There is no other stage to send them to."""

    def expect_tokens(self, count: int) -> ExpectedTokens:
        """Raises RuntimeError: this stage draws."""
        raise RuntimeError("there is no stage behind")
