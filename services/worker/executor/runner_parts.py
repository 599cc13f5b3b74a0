"""What runners of one rank are made from: they differ in their KV memory, and in what they have captured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from msgspec.structs import replace

from services.worker.executor.device_runner import DeviceRunner
from services.worker.executor.host_runner import HostRunner
from services.worker.executor.runner import RankComponents, RankMemory, RankState
from services.worker.executor.token_table import table_bytes
from services.worker.graphs.replayed_decodes import Replaying
from services.worker.speculation.drafter import Drafter, SupportsDecodeReplay
from services.worker.speculation.proposer import Proposer

Runner = HostRunner | DeviceRunner


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerParts(RankComponents):
    """What runners of one rank are made of."""

    drafter: Drafter | None = None
    processed: bool = False
    """Whether the engine has logits processors, on one of its ranks."""

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of a KV block, of the model and of the draft model together."""
        return self.decoder.kv_block_bytes + (0 if self.drafter is None else self.drafter.kv_block_bytes)

    def runner(
        self,
        num_blocks: int,
        max_model_len: int,
        replaying: Replaying | None = None,
        replaying_drafts: Replaying | None = None,
        *,
        state_checkpoints: int = 0,
    ) -> Runner:
        """With memory of its own for so many blocks; what is `replaying` captures the model's decodes, and those of a
        model that drafts."""
        parts = dataclasses.replace(self, card=replace(self.card, max_model_len=max_model_len))
        proposer = self._proposer(num_blocks, replaying_drafts)
        rank = RankState(parts, RankMemory(num_blocks, state_checkpoints), proposer=proposer, replaying=replaying)
        return DeviceRunner(rank) if self.launches else HostRunner(rank)

    def _proposer(self, num_blocks: int, replaying: Replaying | None) -> Proposer | None:
        proposer = None if self.drafter is None else self.drafter.proposer(num_blocks, self.max_num_seqs)
        if replaying is not None and isinstance(proposer, SupportsDecodeReplay):
            proposer.replay_by(replaying)
        return proposer

    @property
    def token_bytes(self) -> int:
        """What the tokens of all sequences take on a device that reads them there."""
        return table_bytes(self.max_num_seqs, self.card.max_model_len + 1) if self.launches else 0

    @property
    def branch_bytes(self) -> int:
        """What keys and values of trees of drafts take, beside all blocks of sequences."""
        tree = self.drafting.tree
        if tree is None:
            return 0
        drafted = 0 if self.drafter is None else tree.lane_blocks(self.max_num_seqs) * self.drafter.kv_block_bytes
        return tree.branch_blocks(self.max_num_seqs) * self.decoder.kv_block_bytes + drafted

    @property
    def launches(self) -> bool:
        """Whether the device works by itself, and nobody needs what is drawn in main memory; logits processors do."""
        return self.platform.launches_ahead and self.pipeline.stages == 1 and not self.processed
