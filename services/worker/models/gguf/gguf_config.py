"""What GGUF's metadata say of a model, as `config.json` and names of tensors as Hugging Face has them."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.models.gguf.gguf_file import GgufFile

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"
"""What each frequency is divided by."""
_OF_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of Llama 3.1 to 3.3: the file has only what follows from them."""


def tensor_name(file: GgufFile, name: str) -> str:
    """What Hugging Face calls the tensor. Raises ModelError for one that no known model has."""
    if name in _WHOLE:
        return _WHOLE[name]
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in _OF_LAYERS:
        raise ModelError(f"{file.path}: tensor {name} is not known of {file.architecture}")
    return f"model.layers.{found[1]}.{_OF_LAYERS[found[2]]}.{found[3]}"


def rotated_outputs(file: GgufFile, name: str) -> Tensor | None:
    """Where each output of Hugging Face's tensor is in the file's: Llama's are laid out for rotation by neighbours
    there, and by halves here. None: in the same place."""
    found = _LAYER.fullmatch(name)
    if file.architecture != "llama" or found is None or found[2] not in ("attn_q", "attn_k"):
        return None
    heads = _number(file, "attention.head_count" if found[2] == "attn_q" else "attention.head_count_kv")
    outputs = file.shapes[name][0]
    return torch.arange(outputs).view(heads, outputs // heads // 2, 2).transpose(1, 2).flatten()


def hugging_face_config(file: GgufFile) -> dict[str, Any]:
    """`config.json`. Raises ModelError for another family than Llama, Qwen2 and Qwen3, or what such cannot be."""
    if file.architecture not in _ARCHITECTURES:
        raise ModelError(f"{file.path}: architecture {file.architecture!r}; supported: {', '.join(_ARCHITECTURES)}")
    if file.metadata.get(f"{file.architecture}.expert_count"):
        raise ModelError(f"{file.path}: mixtures of experts are not read from GGUF")
    if "token_embd.weight" not in file.shapes:
        raise ModelError(f"{file.path}: there is no tensor token_embd.weight")
    vocabulary, hidden = _embedding(file)
    heads = _number(file, "attention.head_count")
    theta = float(_value(file, "rope.freq_base", 10_000.0))
    head_dim = int(_value(file, "attention.key_length", hidden // heads))
    config = {
        "architectures": [_ARCHITECTURES[file.architecture]],
        "model_type": file.architecture,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": _number(file, "feed_forward_length"),
        "num_hidden_layers": _number(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_value(file, "attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": _number(file, "context_length"),
        "rms_norm_eps": float(_value(file, "attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": theta,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.shapes,
        "tie_word_embeddings": "output.weight" not in file.shapes,
        "torch_dtype": _dtype(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    scaling = _scaling(file, theta, head_dim)
    return config if scaling is None else config | {"rope_scaling": scaling}


def _embedding(file: GgufFile) -> tuple[int, int]:
    """Its shape. Raises ModelError where it has not a row for each token."""
    shape = file.shapes["token_embd.weight"]
    tokens = file.metadata.get("tokenizer.ggml.tokens")  # how many
    if len(shape) != 2 or not isinstance(tokens, int) or tokens > shape[0]:
        raise ModelError(
            f"{file.path}: tensor token_embd.weight has shape {list(shape)}, tokenizer.ggml.tokens {tokens} tokens; "
            "a row for each token is expected"
        )
    return shape[0], shape[1]


def stop_token_ids(file: GgufFile) -> list[int]:
    """Tokens that end a text or a turn."""
    found = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return list(dict.fromkeys(each for each in found if each is not None))


def _dtype(file: GgufFile) -> str:
    """That which matrices have; bfloat16 where they have codes."""
    dtype = torch.bfloat16 if file.quantized else file.numbers("token_embd.weight").dtype
    return str(dtype).removeprefix("torch.")


def _scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    kind = _value(file, "rope.scaling.type", "none")
    if ROPE_FACTORS in file.shapes:
        return _llama3(file, theta, head_dim)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path}: rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn")
    scaling = {"rope_type": kind, "factor": float(_value(file, "rope.scaling.factor", 1.0))}
    original = _value(file, "rope.scaling.original_context_length", None)
    return scaling if original is None else scaling | {"original_max_position_embeddings": int(original)}


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """What gives the file's factors. Raises ModelError where nothing does."""
    found = file.numbers(ROPE_FACTORS).float()
    factor = float(found.max())
    original = _LLAMA3["original_max_position_embeddings"]
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]

    def of(wave: float) -> float:
        if wave < original / high:
            return 1.0
        if wave > original / low:
            return factor
        smooth = (original / wave - low) / (high - low)
        return 1 / ((1 - smooth) / factor + smooth)

    waves = [2 * math.pi * theta ** (2 * i / head_dim) for i in range(len(found))]
    if (found - torch.tensor([of(wave) for wave in waves])).abs().max() > 1e-3 * factor:
        raise ModelError(f"{file.path}: {ROPE_FACTORS} are not those of Llama 3.1 to 3.3, which can be read")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _number(file: GgufFile, key: str) -> int:
    name = f"{file.architecture}.{key}"
    found = file.metadata.get(name)
    if not isinstance(found, int) or found < 1:
        raise ModelError(f"{file.path}: {name}: one number is expected, not {found!r}")
    return found


def _value(file: GgufFile, key: str, default: Any) -> Any:
    return file.metadata.get(f"{file.architecture}.{key}", default)
