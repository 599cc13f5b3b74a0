"""Finds the rows of a plan's new sequences when it arrives: in files of the rank's host, else by the bus."""

from __future__ import annotations

from mmap import mmap

from msgspec.structs import replace

from services.worker.batch.mapped_rows import MappedRows
from shared import topics
from shared.bus import Bus
from shared.ids import EngineId, InstanceId
from shared.media.rows_folder import map_rows
from shared.media.rows_reader import RowsReleased, read_rows
from shared.messages.generation import MediaRows, PromptEmbeds
from shared.messages.worker import NewSequence, StepPlan


class RankRows:
    """Knows the scheduler, which holds the rows of its requests. Owns nothing."""

    def __init__(self, bus: Bus, engine: EngineId) -> None:
        self._bus, self._scheduler = bus, topics.kept_rows(InstanceId(engine))

    async def found(self, plan: StepPlan) -> StepPlan:
        """The plan with the rows that it names. Raises RowsLost where they are nowhere: the scheduler holds what its
        requests need, so its host's memory, or it itself, is gone."""
        return replace(plan, new=tuple([await self._complete(new) for new in plan.new]))

    async def _complete(self, new: NewSequence) -> NewSequence:
        embeds = new.prompt_embeds
        if embeds is None or not embeds.media:
            return new
        media = tuple([None if each is None else await self._mapped(each, embeds) for each in embeds.media])
        return replace(new, prompt_embeds=replace(embeds, media=media))

    async def _mapped(self, kept: MediaRows, embeds: PromptEmbeds) -> MappedRows:
        size = kept.count * embeds.row_bytes
        rows: mmap | bytearray | None = map_rows(kept.path, size)
        if rows is None:
            try:
                rows = await read_rows(self._bus, self._scheduler, kept.name, size)
            except RowsReleased:  # its request has ended meanwhile, so nobody reads what comes of it
                rows = bytearray(size)
        return MappedRows(kept.name, kept.count, kept.owner, kept.path, rows)


def names_rows(plan: StepPlan) -> bool:
    """Whether some new sequence has rows that are not in the plan itself."""
    return any(new.prompt_embeds is not None and new.prompt_embeds.media for new in plan.new)
