"""Which models have an encoder that reads a text: alone, or for a decoder that answers it. By their configuration; no
torch."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from shared.messages.model_card import EncoderDecoderModel

LEARNED_OR_SINUSOIDAL = (
    "BartForConditionalGeneration",
    "BlenderbotForConditionalGeneration",
    "MarianMTModel",
    "MBartForConditionalGeneration",
    "PegasusForConditionalGeneration",
)
"""BART's kin: a table of positions ends their prompts and their answers."""
RELATIVE = ("MT5ForConditionalGeneration", "T5ForConditionalGeneration", "UMT5ForConditionalGeneration")
"""T5's kin: positions are distances, so what they were trained with is a convention."""
ENCODER_DECODER_ARCHITECTURES = (*LEARNED_OR_SINUSOIDAL, *RELATIVE)

TRAINED_POSITIONS = 1024
"""Of models with relative positions whose configuration does not say (mT5: arXiv:2010.11934)."""

NOT_TAKEN = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "length_penalty": 1.0,
    "min_length": 0,
    "early_stopping": False,
    "forced_eos_token_id": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
}
"""What `generation_config.json` may say of a search, and the value that changes nothing: requests are not searched by
it."""

ALONE = (
    *("albert", "bert", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra", "ernie"),
    *("eurobert", "gemma3_text", "gte", "jina_embeddings_v3", "modernbert", "mpnet", "nomic_bert", "roberta"),
    *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
)
"""Encoders without a decoder, by `model_type`."""
_ALSO_DECODERS = ("gemma3_text",)
"""Encoders where the configuration says `use_bidirectional_attention`, as EmbeddingGemma's does."""

_R = TypeVar("_R")


class _RawEncoder(Struct):
    model_type: str = ""
    is_decoder: bool = False
    use_bidirectional_attention: bool | None = None


class _RawEncoderDecoder(Struct):
    architectures: tuple[str, ...] = ()
    d_model: int = 0
    max_position_embeddings: int = 1024
    n_positions: int = TRAINED_POSITIONS
    decoder_start_token_id: int | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    forced_bos_token_id: int | None = None


class _RawAnswers(Struct):
    decoder_start_token_id: int | None = None
    bos_token_id: int | None = None
    forced_bos_token_id: int | None = None


def encoder_type(folder: Path) -> str | None:
    """The `model_type` of the model in `folder` where it is an encoder without a decoder that can be served, else None.
    Its engines make vectors and labels: they generate nothing, and keep nothing of a prompt."""
    raw = _read(folder / "config.json", _RawEncoder)
    if raw is None or raw.model_type not in ALONE or raw.is_decoder:
        return None
    decodes = raw.model_type in _ALSO_DECODERS and not raw.use_bidirectional_attention
    return None if decodes else raw.model_type


def read_encoder_decoder(folder: Path) -> EncoderDecoderModel | None:
    """What `config.json` and `generation_config.json` say; None where there is no such file, or the model is none. What
    else may be wrong with the files is for those to say who read all of them."""
    raw = _read(folder / "config.json", _RawEncoderDecoder)
    if raw is None or not any(each in ENCODER_DECODER_ARCHITECTURES for each in raw.architectures):
        return None
    said = _read(folder / "generation_config.json", _RawAnswers) or _RawAnswers()
    starts = (
        *(said.decoder_start_token_id, raw.decoder_start_token_id),
        *(said.bos_token_id, raw.bos_token_id, raw.pad_token_id),
    )
    forced = raw.forced_bos_token_id if said.forced_bos_token_id is None else said.forced_bos_token_id
    relative = any(each in RELATIVE for each in raw.architectures)
    return EncoderDecoderModel(
        row_size=raw.d_model,
        rows=raw.n_positions if relative else raw.max_position_embeddings,
        start=next((each for each in starts if each is not None), 0),
        forced_first=forced,
    )


def settings_not_taken(folder: Path) -> dict[str, object]:
    """What `generation_config.json` in `folder` says of a search that no request gets."""
    said = _read(folder / "generation_config.json", dict[str, object]) or {}
    return {name: said[name] for name, neutral in NOT_TAKEN.items() if said.get(name) not in (None, neutral)}


def _read(path: Path, kind: type[_R]) -> _R | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
