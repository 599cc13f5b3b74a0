"""What a checkpoint says of sampling, and what an operator says of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.messages.model_card import SamplingDefaults
from shared.models.generation_config import FILE, GenerationConfigError, read_sampling_defaults

QWEN3 = '{"do_sample": true, "eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.95}'


def test_a_checkpoints_own_are_taken_but_where_the_operator_says_otherwise(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) is None
    (tmp_path / FILE).write_text(QWEN3)
    assert read_sampling_defaults(tmp_path) == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert read_sampling_defaults(tmp_path, "vllm") is None
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / FILE).write_text('{"max_new_tokens": 7}')
    assert read_sampling_defaults(tmp_path, str(elsewhere)) == SamplingDefaults(max_tokens=7)
    changed = read_sampling_defaults(tmp_path, override='{"temperature": 0, "repetition_penalty": 1.1}')
    assert changed == SamplingDefaults(temperature=0, top_k=20, top_p=0.95, repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"temperature": -1}', "generation_config.json: .*temperature"),
        ('{"top_k": "many"}', r"top_k"),
        ("[]", "generation_config.json: "),
    ],
)
def test_a_file_that_says_nonsense_is_refused_by_name(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(GenerationConfigError, match=complaint):
        read_sampling_defaults(tmp_path)


def test_a_folder_without_the_file_and_keys_without_effect_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GenerationConfigError, match="does not exist; auto, vllm or a folder that has it are allowed"):
        read_sampling_defaults(tmp_path, str(tmp_path / "no"))
    with pytest.raises(GenerationConfigError, match=r"num_beams.*keys of temperature, top_p, top_k"):
        read_sampling_defaults(tmp_path, override='{"num_beams": 4}')
