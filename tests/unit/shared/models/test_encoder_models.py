"""What a model's files say of its encoder, and of how it is asked where a decoder answers what the encoder has read."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.models.encoder_models import encoder_type, read_encoder_decoder, settings_not_taken

BART = {"architectures": ["BartForConditionalGeneration"], "d_model": 8, "max_position_embeddings": 64}
T5 = {"architectures": ["T5ForConditionalGeneration"], "d_model": 8, "n_positions": 32}


@pytest.mark.parametrize(
    ("config", "generation", "rows", "begins"),
    [
        (BART | {"decoder_start_token_id": 2, "bos_token_id": 0}, None, 64, (2,)),
        (BART | {"decoder_start_token_id": 2, "forced_bos_token_id": 0}, None, 64, (2, 0)),
        (BART | {"decoder_start_token_id": 2, "forced_bos_token_id": 0}, {"forced_bos_token_id": 5}, 64, (2, 5)),
        (BART | {"decoder_start_token_id": 2}, {"decoder_start_token_id": 3}, 64, (3,)),
        (BART | {"bos_token_id": 0, "pad_token_id": 1}, {}, 64, (0,)),
        (T5 | {"decoder_start_token_id": 0}, {}, 32, (0,)),
        ({"architectures": ["MT5ForConditionalGeneration"], "d_model": 8, "pad_token_id": 0}, {}, 1024, (0,)),
    ],
)
def test_answers_begin_as_the_files_say(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, rows: int, begins: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    model = read_encoder_decoder(tmp_path)
    assert model is not None
    assert (model.row_size, model.rows, model.decoder_prompt) == (8, rows, begins)


def test_other_models_are_none(tmp_path: Path) -> None:
    assert read_encoder_decoder(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["WhisperForConditionalGeneration"]}))
    assert read_encoder_decoder(tmp_path) is None


def test_what_is_said_of_a_search_is_named_where_it_would_change_something(tmp_path: Path) -> None:
    assert settings_not_taken(tmp_path) == {}
    said = {"num_beams": 4, "no_repeat_ngram_size": 3, "length_penalty": 1.0, "early_stopping": False, "top_k": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert settings_not_taken(tmp_path) == {"num_beams": 4, "no_repeat_ngram_size": 3}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "bert"}, "bert"),
        ({"model_type": "bert", "is_decoder": True}, None),
        ({"model_type": "gemma3_text"}, None),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "gemma3_text"),
        ({"model_type": "llama", "use_bidirectional_attention": True}, None),
        ({"model_type": "t5", "is_encoder_decoder": True}, None),
        ({}, None),
    ],
)
def test_an_encoder_without_a_decoder_is_known_by_its_type(
    tmp_path: Path, config: dict[str, Any], kind: str | None
) -> None:
    assert encoder_type(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert encoder_type(tmp_path) == kind
