"""Between the worker's actor and the threads that compile: grammars of plans in, what became of them out."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from shared.ids import Incarnation
from shared.messages.generation import Grammar
from shared.messages.scheduler import GrammarCompiled

if TYPE_CHECKING:  # behind it is torch, which a simulated worker does without
    from services.worker.guided.library import CompileResult, GrammarLibrary

NOT_HERE = "this engine does no guided decoding: its device is simulated"


class CompileOutbox:
    """Owns the results on their way to the bus: never more than grammars were requested."""

    def __init__(self) -> None:
        self._results: asyncio.Queue[GrammarCompiled] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def request(self, library: GrammarLibrary | None, epoch: Incarnation, grammars: tuple[Grammar, ...]) -> None:
        """Has `grammars` compiled, for `epoch`."""
        for grammar in grammars:
            if library is None:
                self._results.put_nowait(GrammarCompiled(epoch=epoch, grammar=grammar, error=NOT_HERE))
            else:
                library.request(grammar, lambda outcome: self._post(epoch, outcome))

    async def next_result(self) -> GrammarCompiled:
        """The next grammar of which the outcome is known."""
        return await self._results.get()

    def _post(self, epoch: Incarnation, outcome: CompileResult) -> None:
        compiled = GrammarCompiled(epoch=epoch, grammar=outcome.grammar, error=outcome.error)
        try:
            self._loop.call_soon_threadsafe(self._results.put_nowait, compiled)
        except RuntimeError:  # the loop is closed: the process is ending
            return
