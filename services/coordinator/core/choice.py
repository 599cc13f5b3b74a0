"""Where one request goes, and what was expected of it."""

from __future__ import annotations

from typing import NamedTuple

from services.coordinator.core.expected_prompts import Prompt
from services.coordinator.core.reuse import Reuse
from shared.blocks import BLOCK_SIZE
from shared.ids import DetokenizerId, EngineId, InstanceId
from shared.messages.coordinator import PlacementMade


class Choice(NamedTuple):
    engine: EngineId
    """Who gets the request, and computes its prompt."""
    detokenizer: DetokenizerId
    reuse: Reuse
    """What `engine` need not compute, of `blocks`."""
    blocks: int
    decode_on: EngineId | None = None
    """To whom `engine` hands it over; None: it keeps it."""

    @property
    def predicted_cached(self) -> int:
        """Tokens."""
        return self.reuse.blocks * BLOCK_SIZE

    def told(self, by: InstanceId, prompt: Prompt) -> PlacementMade:
        """To the other coordinators."""
        return PlacementMade(
            coordinator=by,
            engine=self.engine,
            detokenizer=self.detokenizer,
            model=prompt.model,
            prompt=prompt.last_block,
            prompt_blocks=prompt.blocks,
            blocks=self.blocks,
            reused=self.reuse.blocks,
            on_device=self.reuse.device,
            decode_on=self.decode_on,
        )
