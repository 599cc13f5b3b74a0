"""What computes a step: the interface between the worker's actor and a device. Knows no bus and no asyncio."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import Struct

from shared.messages.lifecycle import ModelCard
from shared.messages.scheduler import PromptScored, Sampled, StepTiming
from shared.messages.worker import StepPlan

if TYPE_CHECKING:
    from services.worker.guided.library import GrammarLibrary
    from services.worker.kv.copier import KvShare


class BackendError(Exception):
    """The model cannot be served here; the text says why and what to do."""


class StepOutput(Struct, frozen=True):
    sampled: tuple[Sampled, ...]
    """One entry for each work of the plan that had `sample` set, in the plan's order."""
    timing: StepTiming
    """`wait` is for other ranks' rows: the caller, who knows when the plan came, adds that; and `answer`."""
    drafted: int = 0
    """Draft tokens that were verified, all sequences together."""
    accepted: tuple[int, ...] = ()
    """How many sequences accepted their first draft token, their second, and so on."""
    scored: tuple[PromptScored, ...] = ()
    ended: float | None = None
    """When the device was done, on `time.perf_counter`'s clock; None: when this came out."""
    began: float | None = None
    """When the device began with it; None: when it was launched, or the step before was over."""


class Backend(Protocol):
    """Owns token history, block tables, KV memory and sampling state of one rank's sequences.

    Used from one thread, the compute thread; `step` blocks until the step's tokens are known on the host.
    """

    @property
    def card(self) -> ModelCard: ...

    @property
    def num_blocks(self) -> int:
        """Blocks of KV memory, sized from the memory given after a profiling pass."""

    @property
    def device(self) -> str: ...

    @property
    def kv(self) -> KvShare | None:
        """Its KV memory, for copying blocks beside steps, on another thread; None where there is no memory."""

    @property
    def max_speculate(self) -> int:
        """What `Work.speculate` may ask for at the most; 0 where nothing drafts."""

    @property
    def max_jump_ahead(self) -> int:
        """The same for a sequence with a grammar: forced tokens that one step may yield."""

    @property
    def grammars(self) -> GrammarLibrary | None:
        """Where grammars are compiled; None where nothing here follows any."""

    def step(self, plan: StepPlan) -> StepOutput:
        """Applies `plan` (released, new, work, in this order) and computes it. Its transfers are the caller's affair.

        Whether (epoch, step) follow is the caller's business. Raises on a broken plan (unknown sequence, a block
        table that does not cover the work): that is a bug, and ends the process.
        """

    def reset(self) -> None:
        """Forgets every sequence: a new epoch begins. No step is under way."""


class StepUnderWay(Protocol):
    """A step that the device has been given."""

    def output(self) -> StepOutput:
        """Blocks until the step's tokens are on the host. Called once, in the order of the steps, and on another
        thread than `begin`: it must touch nothing that the next steps are begun with."""


@runtime_checkable
class DeferringBackend(Backend, Protocol):
    """A backend on the processor itself. It can prepare nothing while it computes, but puts what came out into words
    beside the next step."""

    def compute(self, plan: StepPlan) -> StepUnderWay:
        """As `step`. All is computed when it returns, and `output` blocks for nothing."""


class PreparedStep(StepUnderWay, Protocol):
    """A step of which all is known but what those before it draw."""

    def compute(self) -> None:
        """Blocks until the step is computed; `output` blocks for nothing then. Called once, in the steps' order."""


@runtime_checkable
class PreparingBackend(Backend, Protocol):
    """A backend on the processor itself, of which one thread computes while another prepares the next step."""

    def prepare(self, plan: StepPlan) -> PreparedStep:
        """Applies `plan` as `step` does. The steps before it are being computed by another thread, or are about to be;
        where their tokens must be known, it waits for them."""

    def settle(self) -> None:
        """Returns when all that was prepared is computed. Raises what that raised."""

    def computing(self) -> AbstractContextManager[object]:
        """What the thread that computes does so within: entered once, as it costs more than some steps have to give."""


@runtime_checkable
class LaunchingBackend(Backend, Protocol):
    """A backend whose device works by itself: the next step is prepared and launched while it computes.

    So what a step samples must stay on the device, and feed the step behind it there: `begin` of that one comes before
    the host knows the tokens. On CUDA `begin` ends with a copy of them to pinned memory and an event, which `output`
    waits for.
    """

    def begin(self, plan: StepPlan) -> StepUnderWay:
        """Applies `plan` as `step` does, and launches it. At most MOST_BEGUN steps are under way."""


MOST_BEGUN = 2
"""One that the device computes, and one that it finds when it is done. A third would only shut newcomers out."""
