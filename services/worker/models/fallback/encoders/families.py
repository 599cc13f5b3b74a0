"""What is particular to each family of encoders: what its head reads and computes, how positions are counted, and
which attention of its own is replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.models.fallback.encoders.relative_attention import use_deberta_attention, use_mpnet_attention
from shared.messages.generation import PoolingType

_MPNET_PADDING = 1
"""Whatever the configuration says."""


def _token_head(model: Any, states: Tensor) -> Tensor:
    logits: Tensor = model.classifier(states)
    return logits


class EncoderFamily(NamedTuple):
    """What is particular to a family."""

    pooling: Callable[[Any], PoolingType]
    """The configuration → what the classification head reads. Raises ModelError."""
    head: Callable[[Any, Tensor], Tensor]
    """(the model with a head, pooled states [k, size]) → logits [k, labels]."""
    padding: Callable[[Any], int | None]
    """The configuration → the token that counts as padding, whose position has that number, too: those of the others
    are counted from behind it. None: every token's is counted, from 0."""
    segments: bool = False
    """Whether tokens are told by which text of a pair they are of."""
    token_head: Callable[[Any, Tensor], Tensor] | None = _token_head
    """As `head`, of a model that classifies tokens; None: there is no such model."""
    rows: Callable[[Any, Tensor], Tensor] | None = None
    """(the model with a head, hidden states) → what is pooled for a head that classifies prompts; None: these."""
    adapt: Callable[[Any], None] | None = None
    """Looks at a model without its head, and replaces an attention that is not asked by the library's interface.
    Raises ModelError."""


def _cls(_: Any) -> PoolingType:
    return "cls"


def _pooler_head(model: Any, states: Tensor) -> Tensor:
    logits: Tensor = model.classifier(model.base_model.pooler(states.unsqueeze(1)))
    return logits


def _distilbert_head(model: Any, states: Tensor) -> Tensor:
    logits: Tensor = model.classifier(F.relu(model.pre_classifier(states)))
    return logits


def _albert_head(model: Any, states: Tensor) -> Tensor:
    logits: Tensor = model.classifier(model.albert.pooler_activation(model.albert.pooler(states)))
    return logits


def _deberta_head(model: Any, states: Tensor) -> Tensor:
    logits: Tensor = model.classifier(model.pooler(states.unsqueeze(1)))
    return logits


def _roberta_head(model: Any, states: Tensor) -> Tensor:
    logits: Tensor = model.classifier(states.unsqueeze(1))
    return logits


def _modernbert_head(model: Any, states: Tensor) -> Tensor:
    logits: Tensor = model.classifier(model.head(states))
    return logits


def _modernbert_pooling(config: Any) -> PoolingType:
    pooling: Literal["cls", "mean"] = config.classifier_pooling
    return pooling


def _eurobert_rows(model: Any, states: Tensor) -> Tensor:
    rows: Tensor = model.activation(model.dense(states)) if model.classifier_pooling == "late" else states
    return rows


def _eurobert_head(model: Any, states: Tensor) -> Tensor:
    pooled = states if model.classifier_pooling == "late" else model.activation(model.dense(states))
    logits: Tensor = model.classifier(pooled)
    return logits


def _eurobert_pooling(config: Any) -> PoolingType:
    match config.classifier_pooling:
        case "bos":
            return "cls"
        case "mean" | "late":  # whose labels' mean is what the last product makes of the mean
            return "mean"
        case other:
            raise ModelError(f"classifier_pooling {other!r} is not supported; supported: 'bos', 'mean', 'late'")


def _check_nomic(model: Any) -> None:
    """A `config.json` in the words of the model's own code, which the library passes over in silence."""
    base, used = getattr(model.config, "rotary_emb_base", None), model.config.rope_parameters["rope_theta"]
    if base not in (None, used):
        raise ModelError(f"rotary_emb_base {base}: transformers reads rope_parameters, which say {used}")


def _last(_: Any) -> PoolingType:
    return "last"


def _gemma_head(model: Any, states: Tensor) -> Tensor:
    logits: Tensor = model.score(states)
    return logits


def _none(_: Any) -> None:
    return None


def _configured(config: Any) -> int:
    padding: int = config.pad_token_id
    return padding


def _mpnets(_: Any) -> int:
    return _MPNET_PADDING


_BERT = EncoderFamily(_cls, _pooler_head, _none, segments=True)
_ROBERTA = EncoderFamily(_cls, _roberta_head, _configured)
_DEBERTA = EncoderFamily(_cls, _deberta_head, _none, segments=True, adapt=use_deberta_attention)
FAMILIES = {
    "albert": EncoderFamily(_cls, _albert_head, _none, segments=True),
    "bert": _BERT,
    "camembert": _ROBERTA,
    "data2vec-text": _ROBERTA,
    "deberta": _DEBERTA,
    "deberta-v2": _DEBERTA,
    "distilbert": EncoderFamily(_cls, _distilbert_head, _none),
    "electra": EncoderFamily(_cls, _roberta_head, _none, segments=True),
    "ernie": _BERT,
    "eurobert": EncoderFamily(_eurobert_pooling, _eurobert_head, _none, rows=_eurobert_rows),
    "gemma3_text": EncoderFamily(_last, _gemma_head, _none, token_head=None),
    "gte": _BERT,
    "jina_embeddings_v3": EncoderFamily(_cls, _roberta_head, _none, segments=True),
    "modernbert": EncoderFamily(_modernbert_pooling, _modernbert_head, _none, token_head=_modernbert_head),
    "mpnet": EncoderFamily(_cls, _roberta_head, _mpnets, adapt=use_mpnet_attention),
    "nomic_bert": _BERT._replace(adapt=_check_nomic),
    "roberta": _ROBERTA,
    "roberta-prelayernorm": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "xlm-roberta-xl": _ROBERTA,
}
"""By `model_type`: each of `encoder_models.ALONE`."""
