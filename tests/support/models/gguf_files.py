"""GGUF files of tiny models, written by llama.cpp's own package, and references with the numbers they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GgmlType
from tokenizers import Tokenizer
from torch import Tensor, nn

from tests.support.models.tiny_models import TinyModel, make_model

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""Multiples of a block of 256 weights."""
_OF_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_DRAWN = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S"}
"""Types that the package reads and does not write."""
_FLOATS = {
    "Q2_K": slice(80, 84),
    "Q3_K": slice(108, 110),
    "Q6_K": slice(208, 210),
    "MXFP4": slice(0, 0),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), slice(0, 4)),
}
"""Where a block has floats of 16 bits, of types that have not one at their beginning."""
Kinds = GgmlType | dict[str, GgmlType]
"""The type of all matrices, or by what is in a tensor's name, of which the last counts."""
Q4_K_M: Kinds = {"": GgmlType.Q4_K, "attn_v": GgmlType.Q6_K, "ffn_down": GgmlType.Q6_K, "output.weight": GgmlType.Q6_K}
"""What llama.cpp makes files called so of, in some layers."""
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_model(
    family: str, folder: Path, kind: Kinds, tokenizer: Tokenizer, *, architecture: str | None = None, **changes: Any
) -> tuple[TinyModel, Path]:
    """A reference with what the file's weights stand for, and the file."""
    kinds = {"": kind} if isinstance(kind, GgmlType) else kind
    model = make_model(family, folder / "original", vocab_size=tokenizer.get_vocab_size(), **SIZES, **changes)
    path = folder / f"{family}.gguf"
    writer = gguf.GGUFWriter(path, architecture or family)
    _write_metadata(writer, model.reference.config)
    _write_tokenizer(writer, tokenizer)
    with torch.no_grad():
        for name, weight in model.reference.named_parameters():
            wanted = next(kinds[part] for part in reversed(kinds) if part in _renamed(name))
            _write_tensor(writer, _renamed(name), weight, wanted, _rotated_heads(family, name, model.reference.config))
    if changes.get("rope_parameters", {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_factors(model.reference))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, path


def _write_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(SIZES["head_dim"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """As convert_hf_to_gguf.py of llama.cpp writes byte-level ones."""
    added = tokenizer.get_added_tokens_decoder()
    tokens = [str(tokenizer.id_to_token(number)) for number in range(tokenizer.get_vocab_size())]
    kinds = [1 if number not in added else 3 if added[number].special else 4 for number in range(len(tokens))]
    merges = [" ".join(pair) for pair in _model_of(tokenizer)["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_eot_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")


def _model_of(tokenizer: Tokenizer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return found


def _renamed(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _WHOLE:
        return f"{_WHOLE[module]}.{kind}"
    number, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_OF_LAYERS[part]}.{kind}"


def _rotated_heads(family: str, name: str, config: Any) -> int | None:
    """Heads whose outputs llama.cpp's converter lays out for rotation by neighbours."""
    if family != "llama" or not ("q_proj" in name or "k_proj" in name):
        return None
    return int(config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)


def _permuted(weight: Tensor, heads: int) -> Tensor:
    return weight.view(heads, 2, len(weight) // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def _write_tensor(writer: gguf.GGUFWriter, name: str, weight: nn.Parameter, kind: GgmlType, heads: int | None) -> None:
    """And leaves in `weight` what was written."""
    if weight.ndim == 1:
        written = weight if heads is None else _permuted(weight, heads)
        writer.add_tensor(name, written.detach().numpy().astype(np.float32))
        return
    numbers = (weight if heads is None else _permuted(weight, heads)).detach().numpy().astype(np.float32)
    blocks = drawn_blocks(numbers.shape, kind) if kind.name in _DRAWN else gguf.quantize(numbers, kind)
    writer.add_tensor(name, blocks, raw_dtype=kind)
    stands_for = torch.from_numpy(gguf.dequantize(blocks, kind).astype(np.float32)).view(weight.shape)
    if heads is not None:
        halves = stands_for.view(heads, len(weight) // heads // 2, 2, -1)
        stands_for = halves.transpose(1, 2).reshape(weight.shape)
    weight.copy_(stands_for)


def drawn_blocks(shape: tuple[int, ...], kind: GgmlType) -> np.ndarray:
    """Random blocks, whose weights are about as large as those of a model."""
    inputs, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(shape[0])
    blocks = random.integers(0, 256, (shape[0] * shape[1] // inputs, size), dtype=np.uint8)
    put_floats(blocks, kind)
    spread = gguf.dequantize(blocks.reshape(shape[0], -1), kind).std()
    put_floats(blocks, kind, 0.05 / float(spread))
    return blocks.reshape(shape[0], -1)


def put_floats(blocks: np.ndarray, kind: GgmlType, times: float = 1.0) -> None:
    """Scales, and least numbers, of blocks [..., bytes of one]."""
    if kind.name == "MXFP4":
        blocks[..., 0] = 96 + blocks[..., 0] % 64
    place = _FLOATS.get(kind.name, slice(0, 2))
    floats = np.array([0.013 * times, 0.021 * times], dtype=np.float16).view(np.uint8)
    blocks[..., place] = floats[: place.stop - place.start]


def _rope_factors(reference: Any) -> np.ndarray:
    """What llama.cpp's converter makes of Llama 3.1's scaling: its frequencies, as parts of those without it."""
    scaled = reference.model.rotary_emb.inv_freq
    theta = reference.config.rope_parameters["rope_theta"]
    plain = 1.0 / theta ** (torch.arange(0, SIZES["head_dim"], 2) / SIZES["head_dim"])
    return (plain / scaled).numpy().astype(np.float32)
