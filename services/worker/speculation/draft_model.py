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

from services.worker.batch.batch import DraftTokens
from services.worker.batch.rows import RowRuns, rows_of
from services.worker.batch.staging import staging_for
from services.worker.distributed.communicator import SingleRank
from services.worker.models.checkpoint import TensorSource, open_checkpoint
from services.worker.models.config import ModelError
from services.worker.models.decoder import Decoder
from services.worker.models.hf_config import read_model_config
from services.worker.models.loading import load_weights
from services.worker.models.published.names import library_names
from services.worker.models.published.transposed import TransposedCheckpoint, has_transposed
from services.worker.models.quantization.quantized_checkpoint import as_configured
from services.worker.models.sharding import shard_of
from services.worker.models.weights import ForwardPass, KvCaches
from services.worker.ops.transfer import to_device
from services.worker.sampling.races import draw_of
from services.worker.speculation.chain import DraftSampler, draft_chain
from services.worker.speculation.drafter import TargetModel
from services.worker.speculation.proposer import ComputedStep, DraftRequest, Indices, Int32s, SequenceHistories
from services.worker.speculation.settings import SpeculationSettings
from shared.messages.worker import NewSequence
from shared.models.image_models import nests_language_model

MAX_READ_TOKENS = 512
"""Tokens that it reads in one step, shortest first: a sequence that is not read to its end drafts later."""

_FEW = 2
"""Tokens of a sequence."""


class DraftModelDrafter(Struct, frozen=True):
    """Owns the draft model's weights, see `Drafter`."""

    decoder: Decoder
    target: TargetModel
    most: int

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of the draft model's own keys and values."""
        return self.decoder.kv_block_bytes

    @property
    def decodes(self) -> int:
        """See `drafter.HasDecoder`."""
        return _FEW

    def proposer(self, num_blocks: int, max_sequences: int) -> DraftModelProposer:
        """A proposer with the draft model's KV caches of `num_blocks` blocks."""
        return DraftModelProposer(self.decoder, self.target.device, self.most, num_blocks, max_sequences)


def open_draft_model(settings: SpeculationSettings, target: TargetModel, most: int) -> DraftModelDrafter:
    """Reads the draft model, whole on the rank that draws, in the model's dtype. Raises ModelError."""
    folder = settings.folder()
    config = read_model_config(folder, quantized=True)
    target.check_sizes(folder, vocab_size=config.vocab_size)
    if config.states is not None:
        raise ModelError(f"{folder}: a model with {config.states.kind} ({config.architecture}) drafts for no other")
    if config.connections is not None:
        raise ModelError(f"{folder}: a model with several streams ({config.architecture}) drafts for no other")
    if config.block_index is not None and target.max_model_len > config.block_index.longest:
        raise ModelError(
            f"{folder}: a model that chooses blocks of keys ({config.architecture}) drafts for sequences of up to "
            f"{config.block_index.longest} tokens, the model is served with {target.max_model_len}"
        )
    if config.max_positions < target.max_model_len:
        raise ModelError(
            f"{folder} has {config.max_positions} positions, the model is served with {target.max_model_len}"
        )
    share = shard_of(config, 0, 1)
    nested, rename = nests_language_model(folder), library_names(config)
    with open_checkpoint(folder, target.dtype, language_model=nested, rename=rename) as checkpoint:
        tensors: TensorSource = as_configured(checkpoint, folder, target.dtype)
        if has_transposed(config.architecture):
            tensors = TransposedCheckpoint(checkpoint, config.architecture)
        weights = load_weights(tensors, config, share, target.ops, target.device, target.max_model_len)
    return DraftModelDrafter(Decoder(config, weights, share, target.ops, SingleRank()), target, most)


class DraftModelProposer:
    """Owns the draft model's keys and values, and how far each sequence and each block is read."""

    def __init__(self, decoder: Decoder, device: torch.device, most: int, num_blocks: int, max_sequences: int) -> None:
        self._decoder = decoder
        self._device = device
        self._staging = staging_for(device)
        self._native = decoder.native
        self._most = most
        self._caches = decoder.allocate_kv(num_blocks)
        self._block_size = decoder.ops.block_size
        self._draw = draw_of(decoder.ops)
        self._forward: ForwardPass = decoder.fastest_pass
        self._replays = False
        self._read = np.zeros(max_sequences, dtype=np.int32)
        """Leading tokens of each sequence that it has keys and values of; drafts that were rejected counted in."""
        self._whole: NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        """Blocks that it has all keys and values of."""

    @torch.inference_mode()
    def replay_by(self, replaying: Callable[[ForwardPass, KvCaches], ForwardPass]) -> None:
        """See `drafter.SupportsDecodeReplay`."""
        self._forward = replaying(self._decoder.forward, self._caches)
        self._replays = True

    def propose(self, request: DraftRequest) -> DraftTokens:
        """No drafts for sequences that the draft model has not read to their end yet."""
        counts = self._read_counts(request)
        logits, through = self._catch_up(request, counts)
        if logits is None:
            return DraftTokens.none(len(request.seq_indices))
        seq_indices, most = request.seq_indices[through], np.minimum(request.limits[through], self._most)
        drafts = self._draft(logits, seq_indices, most, request.histories)
        self._read[seq_indices] = request.histories.lengths[seq_indices] + most - 1
        if len(through) == len(request.seq_indices):
            return DraftTokens(drafts, most)
        drafted = np.zeros(len(request.seq_indices), dtype=np.int32)
        drafted[through] = most
        all_drafts = drafts.new_zeros(len(drafted), drafts.shape[1])
        return DraftTokens(all_drafts.index_copy_(0, to_device(through, self._device), drafts), drafted)

    def _read_counts(self, request: DraftRequest) -> Int32s:
        """[P] tokens that each sequence reads in this step, up to the last one known."""
        lengths = request.histories.lengths[request.seq_indices]
        # Of what was drafted last time, what was rejected is to be read anew.
        self._read[request.seq_indices] = np.minimum(self._read[request.seq_indices], lengths - 1)
        wanted = np.where(request.limits > 0, lengths - self._read[request.seq_indices], 0)
        if wanted.sum() <= MAX_READ_TOKENS:
            return wanted.astype(np.int32)
        order = np.argsort(wanted, kind="stable")
        shares = np.zeros(len(wanted), dtype=np.int32)
        shares[order] = np.clip(MAX_READ_TOKENS - (np.cumsum(wanted[order]) - wanted[order]), 0, wanted[order])
        return shares

    def _catch_up(self, request: DraftRequest, counts: Int32s) -> tuple[Tensor | None, Indices]:
        """Reads; the logits behind the sequences that are through, and which of those asked about they are."""
        reading = np.flatnonzero(counts)
        seq_indices = request.seq_indices[reading]
        units, last_units = self._units(seq_indices, counts[reading])
        ends = self._read[seq_indices] + counts[reading]
        through = ends == request.histories.lengths[seq_indices]
        if not len(reading):
            return None, reading
        rows = rows_of(units, request.histories.block_tables, request.histories.tokens, self._block_size)
        ids, meta = self._staging.place(rows, rows.last_rows[last_units][through])
        logits = self._forward(ids, meta, self._caches)
        self._read[seq_indices] = ends
        size = self._block_size
        last = rows.kv_slots[rows.positions % size == size - 1] // size
        self._whole[last] = True
        return logits, reading[through]

    def _units(self, seq_indices: Indices, counts: Int32s) -> tuple[RowRuns, Indices]:
        """What is read of each sequence, and which unit is its last. Few tokens are decodes of their own where decodes
        are replayed: between two steps with drafts there are no more than two."""
        starts = self._read[seq_indices]
        if not self._replays or counts.max(initial=0) > _FEW:
            return RowRuns(seq_indices, seq_indices, starts, counts), np.arange(len(seq_indices))
        owner = np.repeat(np.arange(len(seq_indices)), counts)
        ends = np.cumsum(counts, dtype=np.intp)
        ahead = (np.arange(len(owner)) - (ends - counts)[owner]).astype(np.int32)
        own = seq_indices[owner]
        return RowRuns(own, own, starts[owner] + ahead, np.ones_like(ahead)), ends - 1

    def _draft(self, logits: Tensor, seq_indices: Indices, most: Int32s, histories: SequenceHistories) -> Tensor:
        """[T, the greatest of most] drafts behind `logits`."""
        draws = DraftSampler(seq_indices, histories, draw=self._draw)
        tokens = [draws.token(logits, [])]
        steps = int(most.max()) - 1
        if steps:
            # Those that may draft no further go on writing behind their last draft: nothing is read from there.
            ahead = np.minimum(np.arange(steps, dtype=np.int32)[:, None], most - 1)
            rows = draft_chain(
                seq_indices,
                histories.lengths[seq_indices] + ahead,
                histories.block_tables,
                self._block_size,
                self._device,
            )
            if draws.greedy and self._native is not None:
                return self._native.draft_chain(tokens[0], rows.meta(0), rows.steps, rows.stride, self._caches).t()
            for step in range(steps):
                following = self._forward(tokens[-1], rows.meta(step), self._caches)
                assert following is not None, "every row is asked for"
                tokens.append(draws.token(following, tokens))
        return torch.stack(tokens, dim=1)

    def observe(self, computed: ComputedStep) -> None:
        """Blocks that the model begins anew hold something else of the draft model."""
        size = self._block_size
        self._whole[computed.kv_slots[computed.positions % size == 0] // size] = False

    def start_sequence(self, seq_index: int, new: NewSequence, histories: SequenceHistories) -> None:
        """Of what the sequence's first blocks hold, only blocks that the draft model has whole count as read."""
        blocks = histories.block_tables[seq_index, : new.computed // self._block_size]
        missing = np.flatnonzero(~self._whole[blocks])
        self._read[seq_index] = self._block_size * (missing[0] if len(missing) else len(blocks))

    def end_sequence(self, seq_index: int, histories: SequenceHistories) -> None:
        """Nothing to do: its place is written anew before it is read again."""

    def forget_blocks(self, blocks: Int32s) -> None:
        """The draft model has nothing of what these blocks hold now."""
        self._whole[blocks] = False

    def clear(self) -> None:
        """No block is known to be whole from here on."""
        self._whole[:] = False
