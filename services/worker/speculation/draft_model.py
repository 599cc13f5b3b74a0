"""A second, smaller model drafts token by token, with keys and values of its own under the engine's block ids.

It reads what it has not read yet of a sequence when the sequence first speculates. What blocks hold of it is known:
blocks that another engine computed, or that lie there from a time without speculation, are read again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from services.worker.crossing import sent
from services.worker.model.checkpoint import open_checkpoint
from services.worker.model.config import ModelConfig, ModelError
from services.worker.model.decoder import Decoder, ForwardPass, KvCaches
from services.worker.model.hf_config import read_model_config
from services.worker.model.loading import load_weights
from services.worker.parallel import SingleRank, share_of
from services.worker.rows import Units, rows_of
from services.worker.speculation.chain import DraftsOn, Draws, FusesDrafts, chain
from services.worker.speculation.drafter import Target
from services.worker.speculation.proposer import Asked, Computed, Drafts, Histories, Int32s, Slots
from services.worker.speculation.settings import Speculation
from services.worker.staging import staging_for
from shared.blocks import BLOCK_SIZE

MOST_READ = 512
"""Tokens that it reads in one step, those first who have least to read: whoever is not through drafts later."""

_FEW = 2
"""Tokens of a sequence."""


class DraftModelDrafter(Struct, frozen=True):
    """See `drafter.Drafter`."""

    decoder: Decoder
    config: ModelConfig
    target: Target
    most: int

    @property
    def kv_block_bytes(self) -> int:
        return self.decoder.kv_block_bytes

    @property
    def decodes(self) -> int:
        """See `drafter.HasDecoder`."""
        return _FEW

    def proposer(self, num_blocks: int, max_sequences: int) -> DraftModelProposer:
        ops = self.decoder.ops
        fused = ops.fuse_drafts(self.config, self.decoder.weights) if isinstance(ops, FusesDrafts) else None
        return DraftModelProposer(self.decoder, fused, self.target.device, self.most, num_blocks, max_sequences)


def open_draft_model(settings: Speculation, target: Target, most: int) -> DraftModelDrafter:
    """Whole on the rank that draws, in the model's dtype. Raises ModelError."""
    folder = settings.folder()
    config = read_model_config(folder)
    target.check_same(folder, vocab_size=config.vocab_size)
    if config.max_positions < target.max_model_len:
        raise ModelError(
            f"{folder} has {config.max_positions} positions, the model is served with {target.max_model_len}"
        )
    share = share_of(config, 0, 1)
    with open_checkpoint(folder, target.dtype) as checkpoint:
        weights = load_weights(checkpoint, config, share, target.ops, target.device, target.max_model_len)
    return DraftModelDrafter(Decoder(config, weights, share, target.ops, SingleRank()), config, target, most)


class DraftModelProposer:
    """Owns the draft model's keys and values, and how far each sequence and each block is read."""

    def __init__(
        self,
        decoder: Decoder,
        fused: DraftsOn | None,
        device: torch.device,
        most: int,
        num_blocks: int,
        max_sequences: int,
    ) -> None:
        self._decoder = decoder
        self._device = device
        self._staging = staging_for(device)
        self._most = most
        self._fused = fused
        self._caches = decoder.allocate_kv(num_blocks)
        self._forward: ForwardPass = decoder.forward
        self._replays = False
        self._read = np.zeros(max_sequences, dtype=np.int32)
        """Leading tokens of each sequence that it has keys and values of; drafts that were rejected counted in."""
        self._whole: NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        """Blocks that it has all keys and values of."""

    @torch.inference_mode()
    def replay_by(self, replaying: Callable[[ForwardPass, KvCaches], ForwardPass]) -> None:
        """See `drafter.ReplaysDecodes`."""
        self._forward = replaying(self._decoder.forward, self._caches)
        self._replays = True

    def propose(self, asked: Asked) -> Drafts:
        counts = self._shares(asked)
        logits, through = self._catch_up(asked, counts)
        if logits is None:
            return Drafts.none(asked)
        slots, most = asked.slots[through], np.minimum(asked.most[through], self._most)
        drafts = self._drafted(logits, slots, most, asked.histories)
        self._read[slots] = asked.histories.lengths[slots] + most - 1
        if len(through) == len(asked.slots):
            return Drafts(drafts, most)
        drafted = np.zeros(len(asked.slots), dtype=np.int32)
        drafted[through] = most
        all_drafts = drafts.new_zeros(len(drafted), drafts.shape[1])
        return Drafts(all_drafts.index_copy_(0, sent(through, self._device), drafts), drafted)

    def _shares(self, asked: Asked) -> Int32s:
        """[P] tokens that each sequence reads in this step, up to the last one known."""
        lengths = asked.histories.lengths[asked.slots]
        # Of what was drafted last time, what was rejected is to be read anew.
        self._read[asked.slots] = np.minimum(self._read[asked.slots], lengths - 1)
        wanted = np.where(asked.most > 0, lengths - self._read[asked.slots], 0)
        if wanted.sum() <= MOST_READ:
            return wanted.astype(np.int32)
        order = np.argsort(wanted, kind="stable")
        shares = np.zeros(len(wanted), dtype=np.int32)
        shares[order] = np.clip(MOST_READ - (np.cumsum(wanted[order]) - wanted[order]), 0, wanted[order])
        return shares

    def _catch_up(self, asked: Asked, counts: Int32s) -> tuple[Tensor | None, Slots]:
        """Reads; the logits behind the sequences that are through, and which of those asked about they are."""
        reading = np.flatnonzero(counts)
        slots = asked.slots[reading]
        units, last_units = self._units(slots, counts[reading])
        ends = self._read[slots] + counts[reading]
        through = ends == asked.histories.lengths[slots]
        if not len(reading):
            return None, reading
        rows = rows_of(units, asked.histories.block_tables, asked.histories.tokens)
        ids, meta = self._staging.place(rows, rows.last_rows[last_units][through])
        logits = self._forward(ids, meta, self._caches)
        self._read[slots] = ends
        last = rows.kv_slots[rows.positions % BLOCK_SIZE == BLOCK_SIZE - 1] // BLOCK_SIZE
        self._whole[last] = True
        return logits, reading[through]

    def _units(self, slots: Slots, counts: Int32s) -> tuple[Units, Slots]:
        """What is read of each sequence, and which unit is its last. Few tokens are decodes of their own where decodes
        are replayed: between two steps with drafts there are no more than two."""
        starts = self._read[slots]
        if not self._replays or counts.max(initial=0) > _FEW:
            return Units(slots, slots, starts, counts), np.arange(len(slots))
        owner = np.repeat(np.arange(len(slots)), counts)
        ends = np.cumsum(counts, dtype=np.intp)
        ahead = (np.arange(len(owner)) - (ends - counts)[owner]).astype(np.int32)
        own = slots[owner]
        return Units(own, own, starts[owner] + ahead, np.ones_like(ahead)), ends - 1

    def _drafted(self, logits: Tensor, slots: Slots, most: Int32s, histories: Histories) -> Tensor:
        """[T, the greatest of most] drafts behind `logits`."""
        draws = Draws(slots, histories)
        tokens = [draws.token(logits, 0)]
        steps = int(most.max()) - 1
        if steps:
            # Those that may draft no further go on writing behind their last draft: nothing is read from there.
            ahead = np.minimum(np.arange(steps, dtype=np.int32)[:, None], most - 1)
            rows = chain(slots, histories.lengths[slots] + ahead, histories.block_tables, self._device)
            if draws.greedy and self._fused is not None:
                return self._fused.draft_on(tokens[0], rows, self._caches).t()
            for step in range(steps):
                following = self._forward(tokens[-1], rows.meta(step), self._caches)
                assert following is not None, "every row is asked for"
                tokens.append(draws.token(following, step + 1))
        return torch.stack(tokens, dim=1)

    def observe(self, computed: Computed) -> None:
        """Blocks that the model begins anew hold something else of the draft model."""
        self._whole[computed.kv_slots[computed.positions % BLOCK_SIZE == 0] // BLOCK_SIZE] = False

    def took(self, slot: int, computed: int, histories: Histories) -> None:
        blocks = histories.block_tables[slot, : computed // BLOCK_SIZE]
        missing = np.flatnonzero(~self._whole[blocks])
        self._read[slot] = BLOCK_SIZE * (missing[0] if len(missing) else len(blocks))

    def loaded(self, blocks: Int32s) -> None:
        self._whole[blocks] = False

    def clear(self) -> None:
        self._whole[:] = False
