"""A decoder of `transformers` whose tokens attend to an encoder's rows too (cross-attention): Whisper's, BART's, T5's.

The rows come with the request: what made them is another service. Keys and values of them are written once, in the
first step of a sequence, to blocks of a group of their own; layer by layer these lie in the cache of the layer's own
attention, whose blocks have the same bytes. The library's modules project whatever rows they are given; here these are
the rows of the step's new sequences, often none.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from services.worker.kv.copier import RankKvCache
from services.worker.kv.state_pages import RankCheckpoints
from services.worker.models.fallback.attention import CROSS, AttentionLayers, RecordedLayers, answered_by
from services.worker.models.fallback.library_decoder import LibraryDecoder
from services.worker.models.weights import KvCaches
from services.worker.ops.interface import InputRows

_CROSS_ATTENTION = ("encoder_attn", "EncDecAttention", "cross_attn")
"""What the library calls it in a layer: BART and Whisper, T5, Llama 3.2 Vision."""


class GivenPositions(nn.Module):
    """Rows of a decoder's own table of positions, which counts them in its batch: ours has many sequences."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.positions: Tensor | None = None
        """Of the rows of the next pass."""

    def forward(self, rows: object, *_: object, **__: object) -> Tensor:
        """`rows`: what the library counts; see `positions`."""
        found: Tensor = self.table(rows, position_ids=self.positions)
        return found


def prepare_decoder(model: nn.Module) -> None:
    """Has modules say that what they attend to is an encoder's, and tell positions as a step has them."""
    owner: Any = model
    decoder = owner.get_decoder()
    for name, module in decoder.named_modules():
        if name.rpartition(".")[2] in _CROSS_ATTENTION:
            setattr(module, CROSS, True)
        if hasattr(module, "relative_attention_num_buckets"):
            _take_relative_positions(module)
    if hasattr(decoder, "embed_positions") and "position_ids" not in signature(type(decoder).forward).parameters:
        decoder.embed_positions = GivenPositions(decoder.embed_positions)


def _take_relative_positions(module: Any) -> None:
    """T5 builds biases for each two rows of its batch: ours are of distances, which all layers are handed by the first
    (UMT5's have their own). Nothing is added to scores of an encoder's rows."""
    biases = None
    if not getattr(module, CROSS, False):
        if not module.has_relative_attention_bias:
            return
        biases = _biases_of_distances(module)
    module.has_relative_attention_bias = True  # or it makes zeros for each two rows
    module.compute_bias = lambda *_, **__: biases


@torch.no_grad()
def _biases_of_distances(module: Any) -> Tensor:
    """float32 [H, distances]: the last one is of all that are greater."""
    rows = module.relative_attention_max_distance + 1
    of_pairs: Tensor = module.compute_bias(rows, rows)  # [1, H, rows, tokens]
    return of_pairs[0, :, -1].flip(-1).float().contiguous()


class LibraryEncoderDecoder(LibraryDecoder):
    """See `LibraryDecoder`; of one rank and stage, with a decoder that is prepared."""

    def allocate_kv(self, num_blocks: int, sequences: int = 0) -> KvCaches:
        """Caches of `num_blocks` blocks for every layer, one behind the other in one memory: a layer across has
        several, as one of so many times the blocks (`KvCacheGroup.parts`)."""
        if self._groups is None:
            return super().allocate_kv(num_blocks, sequences)
        both = self._ops.allocate_kv(self._groups.caches * num_blocks, *self._heads[0])
        caches = []
        for group, first in zip(self._groups.group_of, self._groups.cache_of, strict=True):
            own = slice(first * num_blocks, (first + self._groups.groups[group].parts) * num_blocks)
            caches.append((both[0][own], both[1][own]))
        return caches

    def share_kv(self, caches: KvCaches, model: str, checkpoints: RankCheckpoints | None = None) -> RankKvCache | None:
        """None: a store knows blocks of tokens only."""
        return None

    @property
    def across(self) -> tuple[bool, ...]:
        """Of each attention of a pass, whether it is to an encoder's rows."""
        return tuple(call.cross for call in self._calls)

    def _written(self, layers: AttentionLayers) -> Tensor:
        """[1, k, hidden] the rows whose keys and values a pass writes."""
        rows = layers.encoded_rows
        if rows is None:
            # One that nobody looks at: some modules cannot shape none. While layers are found out as many as tokens, as
            # each product is known by the rows that it is given then.
            count = 2 if isinstance(layers, RecordedLayers) else 1
            rows = torch.zeros(count, self._hidden_size, dtype=self._ops.empty_rows(0, 1).dtype, device=self._device)
        return rows.unsqueeze(0)

    def _call(
        self,
        ids: Tensor,
        positions: Tensor,
        logits_rows: Tensor,
        layers: AttentionLayers,
        inputs: InputRows | None = None,
    ) -> Tensor:
        """The library's pass: [1, R, vocab]."""
        owner: Any = self._model
        decoder = owner.get_decoder()
        given: dict[str, Any] = {}
        table = getattr(decoder, "embed_positions", None)
        if isinstance(table, GivenPositions):
            table.positions = positions.long()
        elif table is not None:
            given["position_ids"] = positions.long().unsqueeze(0)
        with answered_by(layers):
            states = decoder(
                input_ids=ids.long().unsqueeze(0),
                encoder_hidden_states=self._written(layers),
                use_cache=False,
                **given,
            ).last_hidden_state
        return self._logits(owner, states[:, logits_rows.long()])

    @staticmethod
    def _logits(owner: Any, states: Tensor) -> Tensor:
        """As the library's classes make them of states [1, R, hidden]."""
        if getattr(owner.config, "scale_decoder_outputs", False):
            states = states * owner.model_dim**-0.5
        logits: Tensor = owner.get_output_embeddings()(states)
        bias = getattr(owner, "final_logits_bias", None)
        return logits if bias is None else logits + bias
