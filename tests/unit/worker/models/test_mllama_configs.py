"""What configs say of Llama 3.2 Vision: for texts, and of its images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.worker.models.config import ModelError
from services.worker.models.hf_config import is_native, read_model_config
from shared.models.image_models import check_tower_sizes, read_cross_images

TEXT: dict[str, Any] = {
    "model_type": "mllama_text_model",
    "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    "eos_token_id": [128001, 128008, 128009],
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
PUBLISHED: dict[str, Any] = {
    "architectures": ["MllamaForConditionalGeneration"],
    "image_token_index": 128256,
    "model_type": "mllama",
    "torch_dtype": "bfloat16",
    "vision_config": {"image_size": 560, "patch_size": 14, "max_num_tiles": 4},
}
"""As 11B has them, in part: what `transformers` takes where nothing is said is the same."""


def write(folder: Path, **text: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**PUBLISHED, "text_config": {**TEXT, **text}}))
    return folder


def test_layers_that_attend_to_images_are_left_out_of_texts(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path))
    assert is_native(tmp_path)
    assert (config.architecture, config.dtype, config.vocab_size) == ("MllamaForCausalLM", "bfloat16", 128_256)
    assert (config.num_layers, config.num_blocks, config.further_words) == (32, 40, 8)
    numbers = [layer.blocks for layer in config.layers]
    assert numbers[:4] == [(0, 0), (1, 1), (2, 2), (4, 4)]
    assert not config.layers_of_block(38)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps) == (32, 8, 128, 1e-5)
    assert config.eos_token_ids == (128001, 128008, 128009)


@pytest.mark.parametrize("across", [[3, 40], [3, 3], [-1], list(range(40))])
def test_other_layers_than_there_are_are_refused(tmp_path: Path, across: list[int]) -> None:
    with pytest.raises(ModelError, match="cross_attention_layers"):
        read_model_config(write(tmp_path, cross_attention_layers=across))


def test_a_prompt_has_room_for_the_rows_of_some_images(tmp_path: Path) -> None:
    """Of 90B for those of 128 MiB, of a small model for four images of all tiles."""
    images = read_cross_images(write(tmp_path, hidden_size=8192))
    assert images is not None
    assert (images.token, images.row_size, images.rows) == (128_256, 8192, 8192)
    images = read_cross_images(write(tmp_path, hidden_size=64))
    assert images is not None
    assert images.rows == 4 * 4 * 1601


def test_a_tower_has_one_size(tmp_path: Path) -> None:
    """Which is an error, and no model of texts."""
    path = write(tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["vision_config"]["image_size"] = [560, 560]
    (path / "config.json").write_text(json.dumps(config))
    assert read_cross_images(path) is not None
    with pytest.raises(ValueError, match=r"vision_config.image_size \[560, 560\] is not allowed; a whole number"):
        check_tower_sizes(path)
