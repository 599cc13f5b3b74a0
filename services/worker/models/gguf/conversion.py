"""Makes a model directory of a GGUF file.

Codes that the kernels know (`gguf_codes`) stay what they are, in the layout of compressed-tensors; others become
bfloat16. The directory is there when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.models.gguf.gguf_codes import GgufCodes
from services.worker.models.gguf.gguf_config import (
    ROPE_FACTORS,
    hugging_face_config,
    rotated_outputs,
    stop_token_ids,
    tensor_name,
)
from services.worker.models.gguf.gguf_file import GgufFile, one_line
from services.worker.ops.quantized import pack_nibbles

_SHARD_BYTES = 2 << 30
_WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
_CODES = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
    "ignore": [],
}


def convert(source: Path, folder: Path) -> set[str]:
    """The ggml types whose matrices became numbers. Raises ModelError for a file that cannot be read. Several processes
    may convert the same one at once."""
    file = GgufFile(source)
    config = hugging_face_config(file)
    names = {name: tensor_name(file, name) for name in file.shapes if name != ROPE_FACTORS}
    tokenizer, settings = file.tokenizer
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    part.mkdir(parents=True)
    try:
        if _write_weights(file, names, part):
            config["quantization_config"] = _CODES
        _write_json(part / "config.json", config)
        _write_json(part / "generation_config.json", {"eos_token_id": stop_token_ids(file)})
        _write_json(part / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **settings})
        (part / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        if not folder.exists():
            part.rename(folder)
        return file.without_codes
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_weights(file: GgufFile, names: dict[str, str], folder: Path) -> bool:
    """Whether there are codes among them."""
    shards: list[dict[str, Tensor]] = [{}]
    index: dict[str, str] = {}
    held, coded = 0, False
    for name, known in names.items():
        try:
            made = _tensors(file, name, known)
        except RuntimeError as error:  # of PyTorch, where elements do not come in the blocks of their type
            raise ModelError(f"{file.path}: tensor {name}: {one_line(error)}") from None
        coded |= len(made) > 1
        if held > _SHARD_BYTES:
            _write_shard(shards[-1], len(shards), folder)
            shards.append({})
            held = 0
        shards[-1] |= made
        held += sum(each.nbytes for each in made.values())
        index |= dict.fromkeys(made, _shard(len(shards)))
    _write_shard(shards[-1], len(shards), folder)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    return coded


def _tensors(file: GgufFile, name: str, known: str) -> dict[str, Tensor]:
    outputs, codes = rotated_outputs(file, name), file.codes(name)
    if codes is not None:
        module = known.removesuffix(".weight")
        return {f"{module}.{key}": each.contiguous() for key, each in _packed(codes, outputs).items()}
    numbers = file.numbers(name)
    if numbers.ndim > 1 and numbers.dtype == torch.float32 and file.quantized:
        numbers = numbers.bfloat16()
    return {known: (numbers if outputs is None else numbers[outputs]).contiguous()}


def _packed(codes: GgufCodes, outputs: Tensor | None) -> dict[str, Tensor]:
    """As compressed-tensors packs codes: unsigned, the first in the low bits; offsets are ours."""
    made = codes if outputs is None else codes.outputs(outputs)
    packed = made.codes if made.bits == 8 else pack_nibbles(made.codes)
    tensors = {
        "weight_packed": packed.contiguous().view(torch.int32),
        "weight_scale": made.scales,
        "weight_shape": torch.tensor(made.codes.shape),
    }
    return tensors if made.offsets is None else {**tensors, "weight_offset": made.offsets}


def _write_shard(tensors: dict[str, Tensor], number: int, folder: Path) -> None:
    save_file(tensors, folder / _shard(number), metadata={"format": "pt"})
    tensors.clear()


def _shard(number: int) -> str:
    return f"model-{number:05}.safetensors"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
