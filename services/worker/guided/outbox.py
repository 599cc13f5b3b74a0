"""Between the worker's actor and the threads that compile: grammars of plans in, what became of them out."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from shared.ids import Incarnation
from shared.messages.scheduler import GrammarCompiled
from shared.messages.worker import StepPlan

if TYPE_CHECKING:  # behind it is torch, which a simulated worker does without
    from services.worker.guided.library import CompileResult, GrammarLibrary

NOT_HERE = "this engine does no guided decoding: its device is simulated"


class CompileOutbox:
    """Owns the results on their way to the bus: never more than grammars were requested."""

    def __init__(self) -> None:
        self._results: asyncio.Queue[GrammarCompiled] = asyncio.Queue()
        self._epoch: Incarnation | None = None
        self._loop = asyncio.get_running_loop()

    def request(self, library: GrammarLibrary | None, plan: StepPlan) -> None:
        """Has the grammars of `plan` compiled, and others forgotten."""
        epoch = plan.epoch
        if library is not None:
            library.forget(plan.forget)
        for grammar in plan.compile:
            if library is None:
                self._results.put_nowait(GrammarCompiled(epoch=epoch, grammar=grammar.key, error=NOT_HERE))
            else:
                if epoch != self._epoch:
                    self._epoch = epoch
                    library.start_epoch()
                library.request(grammar, lambda outcome: self._post(epoch, outcome))

    async def next_result(self) -> GrammarCompiled:
        """The next grammar of which the outcome is known."""
        return await self._results.get()

    def _post(self, epoch: Incarnation, outcome: CompileResult) -> None:
        grammar, error, fault = outcome
        compiled = GrammarCompiled(epoch=epoch, grammar=grammar, error=error, fault=fault)
        try:
            self._loop.call_soon_threadsafe(self._results.put_nowait, compiled)
        except RuntimeError:  # the loop is closed: the process is ending
            return
