"""Llama 3.2 Vision's language model by `transformers`: between the layers of a Llama lie some that attend to an image's
rows, as far as there are any.

A token in front of its prompt's first image, and one of a prompt without, gets nothing of these layers, as in Meta's
code and in vLLM; `transformers` has the former attend to all images there are, and leaves out what their MLPs give.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from services.worker.kv.copier import RankKvCache
from services.worker.kv.state_pages import RankCheckpoints
from services.worker.models.config import ModelError
from services.worker.models.fallback.attention import AttentionLayers, PagedLayers, answered_by
from services.worker.models.fallback.library_decoder import LibraryDecoder
from services.worker.models.fallback.library_encoder_decoder import LibraryEncoderDecoder
from services.worker.models.sharding import PipelineStage
from services.worker.models.weights import KvCaches, NamedModules
from services.worker.ops.interface import BatchMeta, InputRows

_OF_ROWS = (".cross_attn.k_proj", ".cross_attn.v_proj")
_OUTER_NAMES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""What names begin with in a model with its tower, by any release of `transformers`, and here, where there is none."""


def text_model_name(name: str) -> str:
    """Of a module or tensor in the language model."""
    outer, own = next((each for each in _OUTER_NAMES if name.startswith(each[0])), ("", ""))
    return own + name.removeprefix(outer)


def check_own_tokens(config: PretrainedConfig, stage: PipelineStage) -> None:
    """Raises ModelError for a stage of which no layer attends to a sequence's own tokens: it would cache none, and all
    stages share tables of the blocks of these."""
    text = config.get_text_config(decoder=True)
    across = set(text.cross_attention_layers)
    if across.issuperset(own := range(stage.first_layer, stage.end_layer)):
        raise ModelError(
            f"pp-layers: stage {stage.index} would have layers that attend to images alone ({', '.join(map(str, own))} "
            f"of cross_attention_layers {sorted(across)}): choose another --pp or --pp-layers"
        )


class LibraryImageDecoder(LibraryEncoderDecoder):
    """See `LibraryEncoderDecoder`; of a model whose layers attend either to tokens or to images."""

    def share_kv(self, caches: KvCaches, model: str, checkpoints: RankCheckpoints | None = None) -> RankKvCache | None:
        """Of tokens: whoever has a request's rows makes keys and values of them again."""
        own = [cache for cache, call in zip(caches, self._calls, strict=True) if not call.cross]
        return LibraryDecoder.share_kv(self, own, model, checkpoints)

    def named_modules(self) -> NamedModules:
        """See `LibraryDecoder.named_modules`; keys and values of images are made of their rows."""
        of_rows = frozenset(each for each in self._named if each.endswith(_OF_ROWS))
        return super().named_modules()._replace(beside=of_rows, rename=text_model_name)

    @property
    def _ends_across(self) -> bool:
        """Whether the pass of a stage ends behind a layer for images, which so has to be passed."""
        return hasattr(self._passing.last, "cross_attn")

    def _paged_layers(self, meta: BatchMeta, caches: KvCaches) -> PagedLayers:
        """Of a step that neither sees nor writes rows of images, without the layers for these: the pass leaves them
        out, too."""
        if not self._leaves_out(meta):
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
        if not isinstance(layers, PagedLayers):
            beside["cross_attention_states"] = self._written(layers)
        elif not self._leaves_out(layers.meta):
            rows, encoded = self._written(layers), layers.meta.encoded
            heard = ids.new_zeros(len(ids)) if encoded is None else encoded.heard
            beside["cross_attention_states"] = rows
            if heard is not None:
                beside["full_text_row_masked_out_mask"] = heard.view(1, 1, -1, 1).to(rows.dtype)
        with answered_by(layers):
            logits: Tensor = self._model(
                input_ids=ids.long().unsqueeze(0),
                position_ids=positions.long().unsqueeze(0),
                use_cache=False,
                logits_to_keep=logits_rows.long(),
                **beside,
            ).logits
        return logits

    def _leaves_out(self, meta: BatchMeta) -> bool:
        """Whether no row of the step sees an image, and none is written."""
        encoded = meta.encoded
        if self._ends_across or encoded is None:
            return not self._ends_across
        return encoded.values is None and encoded.heard is not None and not bool(encoded.heard.any())
