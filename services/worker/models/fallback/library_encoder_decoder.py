"""A decoder of `transformers` whose tokens attend to an encoder's rows too (cross-attention, as Whisper's).

The rows come with the request: what made them is another service. Keys and values of them are written once, in the
first step of a sequence, to blocks of a group of their own; layer by layer these lie in the cache of the layer's own
attention, whose blocks have the same bytes. The library's modules project whatever rows they are given; here these are
the rows of the step's new sequences, often none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from services.worker.kv.copier import RankKvCache
from services.worker.kv.state_pages import RankCheckpoints
from services.worker.models.fallback.attention import CROSS, AttentionLayers, answered_by
from services.worker.models.fallback.library_decoder import LibraryDecoder
from services.worker.models.weights import KvCaches
from services.worker.ops.interface import InputRows

_CROSS_ATTENTION = "encoder_attn"
"""What the library calls it in a layer."""


def mark_cross_attention(model: nn.Module) -> None:
    """Has modules say that what they attend to is an encoder's."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == _CROSS_ATTENTION:
            setattr(module, CROSS, True)


class LibraryEncoderDecoder(LibraryDecoder):
    """See `LibraryDecoder`; of one rank and stage, with cross-attention that is marked."""

    def share_kv(self, caches: KvCaches, model: str, checkpoints: RankCheckpoints | None = None) -> RankKvCache | None:
        """None: a store knows blocks of tokens only."""
        return None

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
        decoder, head = owner.get_decoder(), owner.get_output_embeddings()
        rows = layers.encoded_rows
        if rows is None:
            rows = torch.empty(0, self._hidden_size, dtype=head.weight.dtype, device=self._device)
        with answered_by(layers):
            states = decoder(
                input_ids=ids.long().unsqueeze(0),
                position_ids=positions.long().unsqueeze(0),
                encoder_hidden_states=rows.unsqueeze(0),
                use_cache=False,
            ).last_hidden_state
        logits: Tensor = head(states[:, logits_rows.long()])
        return logits
