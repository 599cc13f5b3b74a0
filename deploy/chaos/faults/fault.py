"""What every fault says of itself: what it strikes, how, for how long, and which errors clients may see of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import ClassVar, Literal

from deploy.chaos.stack import ChaosStack, Need

FailureKind = Literal["refused", "connection", "error", "hung"]
"""How a stream can end other than with its text. refused: HTTP 429 or 503 before its first token. connection: it broke,
or could not be made. error: any other status, or an error event in the stream. hung: it did not end in time."""

NOTHING: frozenset[FailureKind] = frozenset()
REFUSED: frozenset[FailureKind] = frozenset({"refused"})
CONNECTION: frozenset[FailureKind] = frozenset({"refused", "connection"})


class Fault(ABC):
    """One kind of fault. It holds no state: what it changed, the end of `strike` undoes."""

    name: ClassVar[str]
    """As `--faults` and the matrix have it."""
    hold: ClassVar[float] = 0.0
    """Seconds from the strike until it is healed."""
    needs: ClassVar[frozenset[Need]] = frozenset()

    def missing(self, stack: ChaosStack) -> str | None:
        """Why it cannot be done here; None where it can."""
        return None

    @abstractmethod
    def targets(self, stack: ChaosStack) -> Mapping[str, Sequence[str]]:
        """What it can strike: a row's name, and the processes (or connections) of which a round takes one."""

    @abstractmethod
    def strike(self, stack: ChaosStack, victim: str) -> AbstractAsyncContextManager[None]:
        """The fault is there while the context lasts, and healed as far as the stack does not heal itself at its
        end."""

    def deadline(self, stack: ChaosStack, victim: str) -> float:
        """Seconds after which the product has to have noticed; its time to recover is counted beyond them."""
        return self.hold

    def allowed(self, stack: ChaosStack, victim: str) -> frozenset[FailureKind]:
        """How streams may fail of it."""
        return NOTHING
