"""Language models within checkpoints with images, by Baton's own code: their texts, and whether the head is the
embedding."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.worker.executor.host_runner import HostRunner
from services.worker.models.config import ModelError
from services.worker.models.hf_config import read_model_config
from services.worker.models.hf_layers.llava import language_model
from services.worker.models.hf_layers.multi_axis import multi_axis_language_model
from tests.support.models.library_models import library_model
from tests.support.models.quantised_files import PACKED, compressed
from tests.support.models.tiny_mllama import make_mllama
from tests.support.models.tiny_models import VOCABULARY, TinyModel
from tests.support.worker.library_situations import check_mixed_batch, check_resumed_sequences
from tests.support.worker.plan_driver import Driver
from tests.support.worker.recorded_logits import record_logits
from tests.support.worker.tiny_backend import tiny_backend

PROMPT = [3 + 7 * i % (VOCABULARY - 3) for i in range(70)]
OUTPUT = 4
LAYERS, LATENT, ROTATED = 3, 32, 8
"""Of the tiny Kimi K2.5."""
_EXPERT = re.compile(r"language_model\.model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return record_logits(monkeypatch)


def native(model: TinyModel, **settings: Any) -> HostRunner:
    backend = tiny_backend(model.path, ops="native", dtype="float32", **settings)
    assert "transformers" not in backend.rank.decoder.ops_name
    return backend


def agrees(model: TinyModel, recorded: list[Tensor], **settings: Any) -> None:
    """Logits of a prompt in chunks and of what follows it are the reference's."""
    driver = Driver(native(model, **settings), budget=32)
    recorded.clear()  # what it tried when it was started
    sequence = driver.add(PROMPT, OUTPUT)
    driver.run()
    expected = model.logits(sequence.tokens)[len(PROMPT) - 1 : -1]
    assert torch.cat(recorded[-OUTPUT:]).sub(expected).abs().max() < 1e-3
    assert expected.std() > 0.3, "a reference this flat would agree with anything"


@pytest.mark.parametrize("architecture", ["Kimi_K25", "Lfm2Vl"])
def test_texts_of_a_model_with_a_tower(architecture: str, tmp_path: Path, recorded: list[Tensor]) -> None:
    model = library_model(architecture, tmp_path)
    agrees(model, recorded)
    backend = native(model)
    check_mixed_batch(model, backend)
    backend.reset()
    if architecture == "Kimi_K25":  # of a state's model, prefixes are found at its pages alone
        check_resumed_sequences(model, backend)
    card: Any = backend.card
    assert card.images == 64


def test_a_token_of_kimi_is_cached_as_a_latent(tmp_path: Path) -> None:
    model = library_model("Kimi_K25", tmp_path)
    backend = native(model)
    assert backend.rank.decoder.kv_block_bytes == 4 * LAYERS * backend.card.block_size * (LATENT + ROTATED)


def test_kimi_as_it_is_published(tmp_path: Path, recorded: list[Tensor]) -> None:
    """`kimi_k2` as the kind of text, the older spelling of a rotation, code of its own, and experts in four bits."""
    model = library_model("Kimi_K25", tmp_path)
    exact = model.logits(PROMPT)
    as_published(model)
    agrees(model, recorded)
    assert (model.logits(PROMPT) - exact).abs().max() > 1e-2, "weights that were not rounded would agree, too"


@pytest.mark.parametrize("tied", [True, False])
def test_texts_of_lfm3_vl(tied: bool, tmp_path: Path, recorded: list[Tensor]) -> None:
    """Its tower is an encoder's."""
    model = library_model("Lfm3Vl", tmp_path, tied=tied)
    backend = native(model)
    card: Any = backend.card
    assert card.images == 64
    agrees(model, recorded)


def test_minimax_m3_as_it_is_published(tmp_path: Path, recorded: list[Tensor]) -> None:
    """Each expert alone, gates and ups apart, and a tower that is an encoder's."""
    model = library_model("MiniMaxM3VL", tmp_path)
    names = list(load_file(tmp_path / "model.safetensors"))
    assert "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight" in names
    assert "language_model.model.layers.0.mlp.gate_proj.weight" in names
    backend = native(model)
    check_mixed_batch(model, backend)
    card: Any = backend.card
    assert card.images == 64
    agrees(model, recorded)


def test_texts_of_llama_3_2_vision(tmp_path: Path, recorded: list[Tensor]) -> None:
    """Layers that attend to images are left out, and those between them have the checkpoint's numbers."""
    model = make_mllama(tmp_path, sees=True)
    agrees(model, recorded, language_model_only=True)
    backend = native(model, language_model_only=True)
    assert backend.card.images is None
    check_mixed_batch(model, backend)
    backend.reset()
    check_resumed_sequences(model, backend)


def as_published(model: TinyModel) -> None:
    """Rewrites what `transformers` wrote of the tiny Kimi K2.5, and rounds the reference's experts."""
    path, file = model.path / "config.json", model.path / "model.safetensors"
    config = json.loads(path.read_text())
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 0}
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    text |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    text["quantization_config"] = PACKED
    config |= {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "tie_word_embeddings": False,
        "auto_map": {"AutoModel": "modeling_kimi_k25.KimiK25ForConditionalGeneration"},
    }
    path.write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    parameters = dict(model.reference.named_parameters())
    for written, tensor in load_file(file).items():
        name = written.replace("language_model.model.blocks.", "language_model.model.layers.")
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            tensors[name] = tensor
            continue
        codes, numbers = compressed(tensor)
        tensors |= {f"{name.removesuffix('weight')}{key}": each.contiguous() for key, each in codes.items()}
        layer, number, part = expert.groups()
        experts = f"model.language_model.layers.{layer}.mlp.experts."
        of_two = {"gate": slice(None, len(numbers)), "up": slice(len(numbers), None), "down": slice(None)}
        stacked = parameters[experts + ("down_proj" if part == "down" else "gate_up_proj")]
        stacked.data[int(number), of_two[part]] = numbers
    assert "language_model.model.layers.1.mlp.experts.0.up_proj.weight_packed" in tensors
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("architecture", ["DeepseekVL", "InternVL", "Kimi_K25", "Lfm2Vl", "Mistral3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_the_embedding_where_the_library_has_it_so(
    architecture: str, tied: bool, tmp_path: Path, recorded: list[Tensor]
) -> None:
    """Whatever `text_config` says."""
    model = library_model(architecture, tmp_path, tied=tied, tie_word_embeddings=not tied)
    assert any("lm_head" in name for name in load_file(tmp_path / "model.safetensors")) is not tied
    agrees(model, recorded)


@pytest.mark.parametrize("architecture", ["Mistral3", "Lfm2Vl"])
def test_a_head_of_its_own_is_read_where_nothing_is_said_of_the_whole(
    architecture: str, tmp_path: Path, recorded: list[Tensor]
) -> None:
    """As in published files of Mistral Small 3.1: the library would tie, but finds two tensors that differ."""
    model = library_model(architecture, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]
    path.write_text(json.dumps(config))
    agrees(model, recorded)


@pytest.mark.parametrize(
    ("outside", "inside", "has_head", "tied"),
    [
        (None, None, None, None),
        (None, False, False, True),
        (None, False, True, False),
        (True, False, False, True),
        (True, False, True, False),
        (True, False, None, True),
        (True, None, True, True),
        (None, False, None, False),
        (False, True, False, True),
        (False, True, True, False),
        (True, True, True, True),
        (False, False, False, False),
    ],
)
def test_what_configuration_and_tensors_say_of_the_head(
    outside: bool | None, inside: bool | None, has_head: bool | None, tied: bool | None
) -> None:
    said = {key: each for key, each in (("tie_word_embeddings", outside),) if each is not None}
    text = {key: each for key, each in (("tie_word_embeddings", inside),) if each is not None}
    whole = json.dumps({**said, "text_config": {"model_type": "mistral", **text}}).encode()
    alone = json.loads(language_model(whole, "Mistral3ForConditionalGeneration", lambda: has_head))
    assert alone.get("tie_word_embeddings") is tied


@pytest.mark.parametrize(
    ("architecture", "supported"),
    [("KimiK25ForConditionalGeneration", "deepseek_v3, kimi_k2"), ("Lfm2VlForConditionalGeneration", "lfm2, lfm2_moe")],
)
def test_other_kinds_of_text_are_refused(architecture: str, supported: str, tmp_path: Path) -> None:
    config = {"architectures": [architecture], "text_config": {"model_type": "llama"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"text_config.model_type 'llama' is not supported; supported: {supported}"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("has_head", [True, False])
def test_tensors_decide_of_heads_beside_positions_of_three_axes(has_head: bool) -> None:
    """Releases before the fifth wrote `true` into `text_config` of Qwen2.5-VL, whose larger ones have heads."""
    text = {"tie_word_embeddings": True, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    whole = json.dumps({"tie_word_embeddings": False, "text_config": text}).encode()
    alone = multi_axis_language_model(whole, "Qwen2_5_VLForConditionalGeneration", lambda: has_head)
    assert json.loads(alone)["tie_word_embeddings"] is not has_head
