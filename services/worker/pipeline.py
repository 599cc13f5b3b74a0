"""What passes between the stages of an engine: rows on their way through the layers, and back the tokens drawn of them.

Stages compute different plans at the same time. So nothing here waits for a stage behind: what is sent is taken when
that stage comes to it, and tokens are awaited when a plan goes on with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class ExpectedTokens(Protocol):
    """Tokens that the last stage is going to draw."""

    def wait(self) -> Sequence[int]:
        """Returns once they are here."""


class Pipeline(Protocol):
    """One rank's way to the ranks at its place in the other stages. Every rank of an engine computes the same steps in
    the same order, so messages need no names."""

    @property
    def stage(self) -> int: ...

    @property
    def stages(self) -> int: ...

    def receive(self, into: Tensor) -> Tensor:
        """The next rows from the stage before, in the memory of `into`, which has their shape and dtype."""

    def take_waited(self) -> float:
        """Seconds that `receive` has waited since this was last asked."""

    def send(self, x: Tensor) -> None:
        """To the stage behind. Nobody may write to `x` any more."""

    def tell(self, tokens: Sequence[int]) -> None:
        """From the last stage to all before it."""

    def expect(self, count: int) -> ExpectedTokens:
        """What the last stage tells next; on all stages before it."""


class SingleStage:
    """An engine of one stage: there is nobody to talk to."""

    stage = 0
    stages = 1

    def receive(self, into: Tensor) -> Tensor:
        raise RuntimeError("there is no stage before")

    def take_waited(self) -> float:
        return 0.0

    def send(self, x: Tensor) -> None:
        raise RuntimeError("there is no stage behind")

    def tell(self, tokens: Sequence[int]) -> None:
        """There is nobody to tell."""

    def expect(self, count: int) -> ExpectedTokens:
        raise RuntimeError("there is no stage behind")
