"""Llama 3.2 Vision's language model by `transformers`: between the layers of a Llama lie some that attend to an image's
rows, as far as there are any.

A token in front of its prompt's first image, and one of a prompt without, gets nothing of these layers, as in Meta's
code and in vLLM; `transformers` has the former attend to all images there are, and leaves out what their MLPs give.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from services.worker.models.fallback.attention import AttentionLayers, PagedLayers, answered_by
from services.worker.models.fallback.library_encoder_decoder import LibraryEncoderDecoder
from services.worker.models.weights import KvCaches
from services.worker.ops.interface import BatchMeta, InputRows


class LibraryImageDecoder(LibraryEncoderDecoder):
    """See `LibraryEncoderDecoder`; of a model whose layers attend either to tokens or to images."""

    def _paged_layers(self, meta: BatchMeta, caches: KvCaches) -> PagedLayers:
        """Of a step that neither sees nor writes rows of images, without the layers for these: the pass leaves them
        out, too."""
        if not _leaves_out(meta):
            return super()._paged_layers(meta, caches)
        own = [number for number, call in enumerate(self._calls) if not call.cross]
        calls, heads = tuple(self._calls[number] for number in own), tuple(self._heads[number] for number in own)
        return PagedLayers(calls, self._ops, meta, [caches[number] for number in own], heads, self._unrotated)

    def _call(
        self,
        ids: Tensor,
        positions: Tensor,
        logits_rows: Tensor,
        layers: AttentionLayers,
        inputs: InputRows | None = None,
    ) -> Tensor:
        """The library's pass: [1, R, vocab]."""
        beside: dict[str, Any] = {}
        if not isinstance(layers, PagedLayers) or not _leaves_out(layers.meta):
            beside["cross_attention_states"] = self._written(layers)
            encoded = layers.meta.encoded if isinstance(layers, PagedLayers) else None
            if encoded is not None and encoded.heard is not None:
                seeing = encoded.heard.view(1, 1, -1, 1).to(beside["cross_attention_states"].dtype)
                beside["full_text_row_masked_out_mask"] = seeing
        with answered_by(layers):
            logits: Tensor = self._model(
                input_ids=ids.long().unsqueeze(0),
                position_ids=positions.long().unsqueeze(0),
                use_cache=False,
                logits_to_keep=logits_rows.long(),
                **beside,
            ).logits
        return logits


def _leaves_out(meta: BatchMeta) -> bool:
    """Whether no row of the step sees an image, and none is written."""
    encoded = meta.encoded
    if encoded is None:
        return True
    return encoded.values is None and encoded.heard is not None and not bool(encoded.heard.any())
