"""Tiny checkpoints in the layouts of architectures whose code comes with them, and what `transformers` makes of their
numbers: by a class that computes the same, or by one of its classes that a few lines change.

Written after the published modeling files and vLLM's readers of them; see ADR 216.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.models.published_mixtures import MIXTURES
from tests.support.models.published_norms import NORMED
from tests.support.models.published_scales import SCALED
from tests.support.models.published_shapes import (
    ALL_HEADS,
    COLUMNS,
    DIM,
    GROUPS,
    HEADS,
    HIDDEN,
    KEYS,
    LAYERS,
    QKV,
    SHAPE,
    Layout,
    plain,
)
from tests.support.models.tiny_models import POSITIONS, VOCABULARY, TinyModel

_INTERNLM2_NAMES = (
    ("model.embed_tokens", "model.tok_embeddings"),
    ("lm_head", "output"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.o_proj", "attention.wo"),
    ("self_attn", "attention"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
)
_QWEN_NAMES = (
    ("model.embed_tokens", "transformer.wte"),
    ("model.layers", "transformer.h"),
    ("model.norm", "transformer.ln_f"),
    ("input_layernorm", "ln_1"),
    ("post_attention_layernorm", "ln_2"),
    ("self_attn.o_proj", "attn.c_proj"),
    ("self_attn", "attn"),
    ("mlp.gate_proj", "mlp.w2"),
    ("mlp.up_proj", "mlp.w1"),
    ("mlp.down_proj", "mlp.c_proj"),
)
_CHATGLM_NAMES = (
    ("model.embed_tokens", "transformer.embedding.word_embeddings"),
    ("lm_head", "transformer.output_layer"),
    ("model.layers", "transformer.encoder.layers"),
    ("model.norm", "transformer.encoder.final_layernorm"),
    ("self_attn.o_proj", "self_attention.dense"),
    ("self_attn", "self_attention"),
    ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
    ("mlp.down_proj", "mlp.dense_4h_to_h"),
)
_TELECHAT_NAMES = (
    ("model.embed_tokens", "transformer.word_embeddings"),
    ("model.layers", "transformer.h"),
    ("model.norm", "transformer.ln_f"),
    ("self_attn.o_proj", "self_attention.dense"),
    ("self_attn.q_proj", "self_attention.query"),
    ("self_attn", "self_attention"),
)
_EXAONE_NAMES = (
    ("model.embed_tokens", "transformer.wte"),
    ("model.layers", "transformer.h"),
    ("model.norm", "transformer.ln_f"),
    ("input_layernorm", "ln_1"),
    ("post_attention_layernorm", "ln_2"),
    ("self_attn.o_proj", "attn.attention.out_proj"),
    ("self_attn", "attn.attention"),
    ("mlp.gate_proj", "mlp.c_fc_0"),
    ("mlp.up_proj", "mlp.c_fc_1"),
    ("mlp.down_proj", "mlp.c_proj"),
)


def _norm_head(model: Any) -> None:
    model.lm_head.weight.data = nn.functional.normalize(model.lm_head.weight.data)


SKIPS: dict[str, list[int]] = {"bskcn_1": [1, 3], "bskcn_2": [1, 3], "bskcn_3": [2, 5], "bskcn_4": [2, 4]}


def _skipping(model: Any) -> None:
    """As the published code has it, before each layer."""
    kept: dict[int, Tensor] = {}

    def before(number: int) -> Callable[..., Any]:
        def hook(_layer: Any, given: tuple[Tensor, ...], named: dict[str, Any]) -> Any:
            rows = given[0]
            for place, key in enumerate(("bskcn_1", "bskcn_2")):
                if number in SKIPS[key]:
                    kept[place] = rows.clone()
            for place, key in enumerate(("bskcn_3", "bskcn_4")):
                if number in SKIPS[key]:
                    rows = kept[place] * 0.8 + rows * (1 - 0.8)
            return (rows, *given[1:]), named

        return hook

    for number, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(before(number), with_kwargs=True)


def _without_rotation(model: Any) -> None:
    model.model.rotary_emb.inv_freq.zero_()


_BAICHUAN = {key: SHAPE[key] for key in KEYS if key not in ("num_key_value_heads", "max_position_embeddings")}
_W_PACK = {"self_attn.W_pack": (QKV, 1)}
_DYNAMIC = {"type": "dynamic", "factor": 2.0}
_SCALE_EMB, _SCALE_DEPTH, _BASE_DIM = 12, 1.4, 16
_LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0 + number / 4 for number in range(DIM // 2)],
    "long_factor": [9.0] * (DIM // 2),
    "original_max_position_embeddings": POSITIONS,
}
_BASE_TOKENS, _THETA = 64, 10_000.0 * 7 ** (DIM / (DIM - 2))
"""TeleChat2: of 256 = 4 * 64 trained tokens the base is multiplied by 2^3 - 1."""

LAYOUTS: dict[str, Layout] = {
    "InternLM2ForCausalLM": Layout(
        plain(bias=False, rope_scaling=_DYNAMIC),
        _INTERNLM2_NAMES,
        {"attention.wqkv": (QKV, GROUPS)},
    ),
    "InternLMForCausalLM": Layout(
        plain(bias=True, rotary={"base": 10_000, "type": "dynamic"}), shape={"attention_bias": True}
    ),
    "InternLM3ForCausalLM": Layout(
        plain(qkv_bias=True, bias=True, head_dim=DIM, rope_scaling=_DYNAMIC),
        shape={"attention_bias": True, "mlp_bias": True},
    ),
    "BaiChuanForCausalLM": Layout({**_BAICHUAN, "max_position_embeddings": POSITIONS}, fused=_W_PACK, shape=ALL_HEADS),
    "BaichuanForCausalLM": Layout(
        {**_BAICHUAN, "max_position_embeddings": POSITIONS, "model_max_length": POSITIONS, "z_loss_weight": 0},
        fused=_W_PACK,
        shape=ALL_HEADS,
        adapt=_norm_head,
    ),
    "BaichuanForCausalLM (13B)": Layout(
        # Six heads, for which ALiBi has slopes between those of a power of two.
        {**_BAICHUAN, "model_max_length": POSITIONS, "num_attention_heads": 6, "hidden_size": 96},
        fused=_W_PACK,
        shape={"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96},
        adapt=_without_rotation,
        alibi=True,
    ),
    "MiniCPMForCausalLM": Layout(
        plain(scale_emb=_SCALE_EMB, scale_depth=_SCALE_DEPTH, dim_model_base=_BASE_DIM),
        reference="GraniteConfig",
        shape={
            "embedding_multiplier": float(_SCALE_EMB),
            "residual_multiplier": _SCALE_DEPTH / math.sqrt(LAYERS),
            "logits_scaling": HIDDEN / _BASE_DIM,
            "attention_multiplier": DIM**-0.5,
            "initializer_range": 0.4,
        },
    ),
    "MiniCPMForCausalLM (4)": Layout(
        plain(scale_emb=1, scale_depth=2.0, dim_model_base=64, rope_scaling=_LONG, sparse_config=None)
        | {"max_position_embeddings": 2 * POSITIONS},
        reference="GraniteConfig",
        shape={
            "embedding_multiplier": 1.0,
            "residual_multiplier": 2.0 / math.sqrt(LAYERS),
            "logits_scaling": 1.0,
            "attention_multiplier": DIM**-0.5,
            "max_position_embeddings": 2 * POSITIONS,
            "rope_parameters": {**_LONG, "rope_theta": 10_000.0},
        },
    ),
    "OrionForCausalLM": Layout(
        plain(),
        reference="StableLmConfig",
        shape={"layer_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "use_qkv_bias": False},
    ),
    "ChatGLMModel": Layout(
        {
            "padded_vocab_size": VOCABULARY,
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "ffn_hidden_size": COLUMNS,
            "num_layers": LAYERS,
            "num_attention_heads": HEADS,
            "kv_channels": DIM,
            "seq_length": POSITIONS,
            "layernorm_epsilon": 1e-5,
            "add_qkv_bias": True,
            "multi_query_attention": True,
            "multi_query_group_num": GROUPS,
            "rope_ratio": 500,
            "original_rope": True,
            "rmsnorm": True,
            "quantization_bit": 0,
        },
        _CHATGLM_NAMES,
        {"self_attention.query_key_value": (QKV, 1)},
        reference="GlmConfig",
        shape={
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        },
    ),
    "QWenLMHeadModel": Layout(
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * COLUMNS,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "kv_channels": DIM,
            "seq_length": POSITIONS,
            "max_position_embeddings": 4 * POSITIONS,
            "layer_norm_epsilon": 1e-5,
            "rotary_emb_base": 10_000,
            "rotary_pct": 1.0,
            "no_bias": True,
            "use_dynamic_ntk": True,
            "use_logn_attn": True,
        },
        _QWEN_NAMES,
        {"attn.c_attn": (QKV, 1)},
        reference="Qwen2Config",
        shape=ALL_HEADS,
    ),
    "TeleChat2ForCausalLM": Layout(
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "ffn_hidden_size": COLUMNS,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "num_key_value_heads": GROUPS,
            "layer_norm_epsilon": 1e-5,
            "base_seqlen": _BASE_TOKENS,
            "training_seqlen": POSITIONS,
        },
        _TELECHAT_NAMES,
        {"self_attention.key_value": (QKV[1:], GROUPS)},
        shape={"attention_bias": True, "mlp_bias": True, "rope_theta": _THETA},
        dropped=("q_proj.bias", "k_proj.bias", "v_proj.bias", "gate_proj.bias", "up_proj.bias"),
    ),
    "ExaoneForCausalLM": Layout(
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": COLUMNS,
            "num_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": GROUPS,
            "max_position_embeddings": POSITIONS,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "silu",
            "rope_theta": 10_000.0,
            "model_type": "exaone",
        },
        _EXAONE_NAMES,
    ),
    **MIXTURES,
    **NORMED,
    **SCALED,
    "GritLM": Layout(plain(sliding_window=None), reference="MistralConfig", shape={"sliding_window": None}),
    "PanguEmbeddedForCausalLM": Layout(
        {key: value for key, value in plain(bias=True).items() if key != "rope_theta"},
        shape={"attention_bias": True, "rope_theta": 16e6},
    ),
    "MiMoForCausalLM": Layout(plain(num_nextn_predict_layers=1, attention_bias=True), reference="Qwen2Config"),
    "SolarForCausalLM": Layout(
        plain(**SKIPS, bskcn_tv=[0.9, 0.8], sliding_window=POSITIONS, num_hidden_layers=6),
        shape={"num_hidden_layers": 6},
        adapt=_skipping,
    ),
    "XverseForCausalLM": Layout(plain()),
    "AquilaForCausalLM": Layout(plain()),
    "IQuestCoderForCausalLM": Layout(plain()),
    "TeleChat3ForCausalLM": Layout(plain()),
    "YiForCausalLM": Layout(plain(), (("input_layernorm", "ln1"), ("post_attention_layernorm", "ln2"))),
}


@dataclass(frozen=True)
class PublishedModel(TinyModel):
    """A checkpoint in a published layout; `same`: that of the library, with its names; `unchanged`: the library's model
    with its numbers."""

    same: Path = Path()
    unchanged: Any = None

    def _generated(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


Written = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
"""What is written of a module's weight, by the ends of the names, and what that stands for."""


def make_published(name: str, folder: Path, write: Written | None = None, **config: Any) -> PublishedModel:
    """Writes the checkpoint in both layouts below `folder`. The same weights every time; norms and biases are random,
    too. `write`: how the matrices of layers are written; None: as they are. `config`: more keys of `config.json`."""
    layout = LAYOUTS[name]
    torch.manual_seed(sum(map(ord, name)))
    kind = getattr(transformers, layout.reference)
    model = transformers.AutoModelForCausalLM.from_config(
        kind(**{**SHAPE, **layout.shape}), attn_implementation="eager"
    ).eval()
    if layout.extend is not None:
        layout.extend(model)
    with torch.no_grad():
        for each, buffer in model.named_buffers():
            if each.endswith("e_score_correction_bias"):
                buffer.add_(torch.rand_like(buffer) * 0.2)
        for each, weight in model.named_parameters():
            if each.endswith(layout.dropped):
                weight.zero_()
            elif weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * (0.5 if "bias" in each else 0.2))
    same, path = folder / "library", folder / "published"
    model.save_pretrained(same)
    path.mkdir()
    written, numbers = dict[str, Tensor](), dict[str, Tensor]()
    for each, tensor in published_tensors(layout, model).items():
        module = each.removesuffix(".weight")
        if layout.transposed and each.endswith(layout.transposed):
            written[each], numbers[each] = tensor.T.contiguous(), tensor
        elif write is None or tensor.ndim == 1 or not any(part.isdigit() for part in each.split(".")):
            written[each] = numbers[each] = tensor
        else:
            codes, numbers[each] = write(module, tensor)
            written |= {f"{module}.{end}": code.contiguous() for end, code in codes.items()}
    save_file(written, path / "model.safetensors", {"format": "pt"})
    architecture = name.partition(" ")[0]
    own = {"model_type": "of_its_own", "architectures": [architecture], "torch_dtype": "float32", "eos_token_id": 2}
    own["auto_map"] = {"AutoModelForCausalLM": f"modeling_own.{architecture}"}
    (path / "config.json").write_text(json.dumps(own | layout.config | config))
    return PublishedModel(name, path, reference_of(layout, model, numbers), same=same, unchanged=model)


def published_tensors(layout: Layout, model: Any) -> dict[str, Tensor]:
    """The library's by the published names, in matrices as they are published."""
    left = {name: each for name, each in model.state_dict().items() if not name.endswith(layout.dropped or "-")}
    found = dict[str, Tensor]()
    for module, (parts, groups) in layout.fused.items():
        for name in [each for each in left if parts[0] in each]:
            of = [left.pop(name.replace(parts[0], part)) for part in parts]
            by_group = [each.view(groups, -1, *each.shape[1:]) for each in of]
            found[name.replace(parts[0], module)] = torch.cat(by_group, dim=1).flatten(0, 1)
    found |= _experts_apart(left)
    for old, new in layout.names:
        found = {name.replace(old, new): tensor for name, tensor in found.items()}
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


def _experts_apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of each expert in place of those of all."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        block, _, kind = name.rpartition(".")
        if not block.endswith("experts"):
            found[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for number, expert in enumerate(tensor):
            for part, each in zip(parts, expert.chunk(len(parts)), strict=True):
                found[f"{block}.{number}.{part}.weight"] = each
    return found


def reference_of(layout: Layout, model: Any, published: dict[str, Tensor]) -> Any:
    """The library's model with the numbers of tensors by the published names."""
    model = deepcopy(model)
    own = model.state_dict()
    for module, (parts, groups) in layout.fused.items():
        for name in [each for each in own if parts[0] in each and not each.endswith(layout.dropped or "-")]:
            names = [name.replace(parts[0], part) for part in parts]
            fused = name.replace(parts[0], module)
            for old, new in layout.names:
                fused = fused.replace(old, new)
            by_group = published[fused].view(groups, -1, *own[name].shape[1:])
            sizes = [len(own[each]) // groups for each in names]
            for each, tensor in zip(names, by_group.split(sizes, dim=1), strict=True):
                own.pop(each).copy_(tensor.flatten(0, 1))
    for each, tensor in own.items():
        name = each
        for old, new in layout.names:
            name = name.replace(old, new)
        if name in published:
            tensor.copy_(published[name])
    if layout.adapt is not None:
        layout.adapt(model)
    return AlibiReference(model) if layout.alibi else model


def write_published_adapter(model: PublishedModel, folder: Path, ends: Sequence[str]) -> PublishedModel:
    """Writes a LoRA adapter of the published modules with these ends of names; the model with it merged."""
    layout, generator = LAYOUTS[model.family], torch.Generator().manual_seed(7)
    numbers, tensors = published_tensors(layout, model.unchanged), dict[str, Tensor]()
    for name, weight in numbers.items():
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or not module.endswith(tuple(ends)):
            continue
        out, inputs = weight.shape
        a = torch.randn(4, inputs, generator=generator) * 0.2
        b = torch.randn(out, 4, generator=generator) * 0.2
        tensors |= {f"base_model.model.{module}.lora_{half}.weight": each for half, each in (("A", a), ("B", b))}
        weight.add_(2.0 * b @ a)
    assert tensors
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": list(ends)}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return PublishedModel(model.family, folder, reference_of(layout, model.unchanged, numbers), same=model.same)


class AlibiReference:
    """The library's model with ALiBi: what the published code of Baichuan 13B adds to scores is its mask."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.slopes = torch.tensor(slopes(model.config.num_attention_heads))

    def __call__(self, ids: Tensor) -> SimpleNamespace:
        count = ids.shape[1]
        distances = torch.arange(count) - torch.arange(count).unsqueeze(1)
        biases = self.slopes.view(-1, 1, 1) * distances
        mask = biases.masked_fill(distances > 0, torch.finfo(torch.float32).min).unsqueeze(0)
        return SimpleNamespace(logits=self.model(input_ids=ids, attention_mask=mask).logits)


def slopes(heads: int) -> list[float]:
    """As `_get_interleave` of the published code has them."""

    def of_power(count: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(count) - 3)))
        return [start * start**number for number in range(count)]

    if math.log2(heads).is_integer():
        return of_power(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return of_power(closest) + slopes(2 * closest)[0::2][: heads - closest]
