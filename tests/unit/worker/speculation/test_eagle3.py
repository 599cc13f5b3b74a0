"""An EAGLE-3 head draws what its paper's code draws, in every layout; the model keeps what it reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from services.worker.batch.batch import Batch
from services.worker.executor.runner import RankState
from services.worker.models.config import ModelError
from services.worker.models.decoder import Decoder
from services.worker.models.hf_config import read_model_config
from services.worker.ops.interface import OpsName
from services.worker.speculation.drafter import TargetModel
from services.worker.speculation.eagle3 import read_taps
from services.worker.speculation.settings import SpeculationSettings
from tests.support.models.tiny_drafters import WORDS, eagle3_config, eagle3_tensors, make_eagle3
from tests.support.models.tiny_models import POSITIONS, VOCABULARY, TinyModel, make_model
from tests.support.worker.plan_driver import Driver
from tests.support.worker.tiny_backend import tiny_backend
from tests.unit.worker.speculation.test_drafter_checkpoints import (
    PROMPT,
    Layout,
    Tensors,
    drafted,
    made_up_features,
    pickled,
    prefixed,
    safetensors,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


def target_of(model: TinyModel, ops: OpsName) -> TargetModel:
    decoder = tiny_backend(model.path, ops=ops).rank.decoder
    config = read_model_config(model.path)
    return TargetModel(model.path, config, decoder, decoder.ops, torch.device("cpu"), torch.float32, POSITIONS, 1)


@pytest.fixture(scope="module")
def target(model: TinyModel) -> TargetModel:
    return target_of(model, "torch")


class Reference:
    """The head in float64, as the paper's code computes it: row by row, over all rows before."""

    def __init__(self, model: TinyModel, tensors: Tensors, *, norms_residual: bool) -> None:
        self._config = model.reference.config
        self._tensors = {name: each.double() if each.is_floating_point() else each for name, each in tensors.items()}
        self._embedding = model.reference.model.embed_tokens.weight.detach().double()
        self._rotary = LlamaRotaryEmbedding(self._config)
        self._norms_residual = norms_residual
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def drafts(self, features: Tensor, following: list[int], count: int) -> list[int]:
        given = features.double() @ self._tensors["fc.weight"].T
        for row, token in zip(given, following, strict=True):
            hidden = self._next(row, token)
        drafts = [self._favourite(hidden)]
        while len(drafts) < count:
            hidden = self._next(hidden, drafts[-1])
            drafts.append(self._favourite(hidden))
        return drafts

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self._tensors[f"midlayer.{name}_proj.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._tensors[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)

    def _next(self, given: Tensor, token: int) -> Tensor:
        normed = self._norm(given, "midlayer.hidden_norm")
        x = torch.cat((self._norm(self._embedding[token], "midlayer.input_layernorm"), normed))
        residual = normed if self._norms_residual else given
        residual = residual + self._linear(self._attention(x), "self_attn.o")
        x = self._norm(residual, "midlayer.post_attention_layernorm")
        gated = F.silu(self._linear(x, "mlp.gate")) * self._linear(x, "mlp.up")
        return residual + self._linear(gated, "mlp.down")

    def _attention(self, x: Tensor) -> Tensor:
        dim, kv_heads = self._config.head_dim, self._config.num_key_value_heads
        queries, keys, values = (self._linear(x, f"self_attn.{part}").view(1, -1, 1, dim) for part in "qkv")
        cos, sin = self._rotary(x, torch.tensor([[len(self._keys)]]))
        queries, keys = apply_rotary_pos_emb(queries, keys, cos.double(), sin.double())
        self._keys.append(keys)
        self._values.append(values)
        groups = queries.shape[1] // kv_heads
        every = [torch.cat(each, 2).repeat_interleave(groups, 1) for each in (self._keys, self._values)]
        return F.scaled_dot_product_attention(queries, *every).flatten()

    def _favourite(self, hidden: Tensor) -> int:
        word = int((self._tensors["lm_head.weight"] @ self._norm(hidden, "norm")).argmax())
        return word + int(self._tensors["d2t"][word])


@pytest.mark.parametrize("norms_residual", [False, True], ids=["", "norm_before_residual"])
@pytest.mark.parametrize("ops", ["torch", "native"])
def test_a_head_drafts_what_the_paper_says(
    model: TinyModel, tmp_path: Path, ops: OpsName, norms_residual: bool
) -> None:
    tensors = eagle3_tensors(model)
    safetensors("model.safetensors")(tensors, tmp_path)
    settings = eagle3_config(model) | {"norm_before_residual": norms_residual}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    reference = Reference(model, tensors, norms_residual=norms_residual)
    expected = reference.drafts(made_up_features(3 * 48), PROMPT[1:], 3)
    assert len(set(expected)) > 1
    assert drafted(target_of(model, ops), "eagle3", tmp_path) == expected


def top_level(settings: dict[str, Any]) -> dict[str, Any]:
    """As vLLM names the layers: by what goes into them."""
    layers = settings.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]
    return settings | {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers]}


def speculators(settings: dict[str, Any]) -> dict[str, Any]:
    inner = top_level(settings)
    own = {key: inner.pop(key) for key in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
    return own | {"architectures": ["Eagle3Speculator"], "transformer_layer_config": inner}


def renamed(old: str, new: str, layout: Layout) -> Layout:
    return lambda tensors, folder: layout({key.replace(old, new): each for key, each in tensors.items()}, folder)


def test_a_head_means_the_same_in_every_layout(model: TinyModel, target: TargetModel, tmp_path: Path) -> None:
    whole = safetensors("model.safetensors")
    layouts: list[tuple[Layout, Callable[[dict[str, Any]], dict[str, Any]]]] = [
        (whole, dict),
        (pickled("pytorch_model.bin"), top_level),
        (renamed("midlayer", "layers.0", prefixed("model.", whole)), top_level),
        (renamed("midlayer", "layers.0", whole), speculators),
    ]
    found = []
    for number, (layout, configured) in enumerate(layouts):
        (folder := tmp_path / str(number)).mkdir()
        layout(eagle3_tensors(model), folder)
        (folder / "config.json").write_text(json.dumps(configured(eagle3_config(model))))
        found.append((drafted(target, "eagle3", folder), read_taps(folder, 3)))
    assert found == [found[0]] * 4
    assert found[0][1] == (1, 2, 3)


def test_a_head_of_all_words_needs_no_head_of_its_own(model: TinyModel, target: TargetModel, tmp_path: Path) -> None:
    """Nor an embedding, which some bring."""
    tensors = eagle3_tensors(model, VOCABULARY)
    embedding, head = model.reference.model.embed_tokens.weight, model.reference.lm_head.weight
    without = {name: each for name, each in tensors.items() if name not in ("d2t", "t2d", "lm_head.weight")}
    its_own = without | {"embed_tokens.weight": embedding.detach(), "lm_head.weight": head.detach().clone()}
    drafts = []
    for number, each in enumerate((without, its_own)):
        (folder := tmp_path / str(number)).mkdir()
        safetensors("model.safetensors")(each, folder)
        settings = eagle3_config(model)
        del settings["draft_vocab_size"]
        (folder / "config.json").write_text(json.dumps(settings))
        drafts.append(drafted(target, "eagle3", folder))
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2: an EAGLE-3 head of one layer is read"),
        ({"architectures": ["MedusaModel"]}, r"architectures \['MedusaModel'\] is no EAGLE-3 head: LlamaForCausalLM"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false is not supported"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
            "in front of the layers 1, 2, 4, counted from 0; the model has 3",
        ),
        ({"vocab_size": 7}, "vocab_size is 7, the model's is 160"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64, the model's hidden_size is 48"),
        ({"draft_vocab_size": 60}, r"tensor d2t has shape \[61\], the config asks for \[60\]"),
    ],
)
def test_what_is_wrong_with_a_head_is_said(
    model: TinyModel, target: TargetModel, tmp_path: Path, changed: dict[str, Any], complaint: str
) -> None:
    make_eagle3(model, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(eagle3_config(model) | changed))
    with pytest.raises(ModelError, match=complaint):
        drafted(target, "eagle3", tmp_path)


def test_a_word_that_is_no_token_is_refused(model: TinyModel, target: TargetModel, tmp_path: Path) -> None:
    make_eagle3(model, tmp_path)
    tensors = eagle3_tensors(model)
    tensors["d2t"][WORDS - 1] = VOCABULARY
    safetensors("model.safetensors")(tensors, tmp_path)
    with pytest.raises(ModelError, match="tensor d2t: every word of the head must be another of 160 tokens"):
        drafted(target, "eagle3", tmp_path)


@pytest.mark.parametrize("ops", ["torch", "native"])
def test_the_model_keeps_what_the_head_reads(
    model: TinyModel, tmp_path: Path, ops: OpsName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt in two chunks and of its decodes: what goes into the layers, as `transformers` has it."""
    folder = make_eagle3(model, tmp_path)
    settings = eagle3_config(model) | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, -1, 0]}}
    (folder / "config.json").write_text(json.dumps(settings))
    backend = tiny_backend(model.path, ops=ops, speculation=SpeculationSettings(method="eagle3", model=str(folder)))
    kept: list[Tensor] = []
    forward = RankState.forward

    def watched(rank: RankState, ids: Tensor, meta: Any, batch: Batch | None = None) -> Any:
        logits, features = forward(rank, ids, meta, batch)
        assert features is not None
        kept.append(features.clone())
        return logits, features

    monkeypatch.setattr(RankState, "forward", watched)
    driver = Driver(backend, budget=5)
    sequence = driver.add(PROMPT, 4)
    driver.run()
    with torch.no_grad():
        states = model.reference(torch.tensor([sequence.tokens[:-1]]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer][0] for layer in (2, 0, 1)], dim=1)
    assert isinstance(backend.rank.decoder, Decoder)
    torch.testing.assert_close(torch.cat(kept), expected, atol=1e-4, rtol=1e-4)
