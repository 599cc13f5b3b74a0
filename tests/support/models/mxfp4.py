"""Weights in blocks of four bits, by the OCP Microscaling Formats (MX) specification 1.0, and what they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models.library_models import library_model
from tests.support.models.tiny_models import TinyModel

BLOCK = 32
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_GREATEST = 2
"""The exponent of the greatest number, 6."""
_BIAS = 127
"""Of a scale's exponent (E8M0)."""


def pack_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight [..., in] → uint8 blocks [..., in / 32, 16], the first of two inputs in the low bits; uint8 scales
    [..., in / 32]; and the numbers that they stand for, as weight. Rounded by section 6.3: a block's scale is the power
    of two that its greatest number's is, less that of the format's."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1).clamp(min=2.0**-100))) - _GREATEST
    scaled = blocks / torch.exp2(exponents).unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - _E2M1).abs().argmin(-1)
    numbers = _E2M1[codes] * scaled.sign() * torch.exp2(exponents).unsqueeze(-1)
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponents + _BIAS).to(torch.uint8), numbers.flatten(-2)


def mxfp4_model(path: Path) -> TinyModel:
    """gpt-oss with its experts in blocks, as OpenAI's checkpoints have them, and a reference with their numbers."""
    model = library_model("GptOss", path)
    tensors = load_file(path / "model.safetensors")
    with torch.no_grad():
        for name, module in model.reference.named_modules():
            if not name.endswith(".experts"):
                continue
            for part in ("gate_up_proj", "down_proj"):
                weight = getattr(module, part)
                blocks, scales, numbers = pack_blocks(weight.transpose(1, 2))  # [E, out, in]
                weight.copy_(numbers.transpose(1, 2))
                del tensors[f"{name}.{part}"]
                tensors |= {f"{name}.{part}_blocks": blocks.contiguous(), f"{name}.{part}_scales": scales}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    left_alone = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left_alone}
    (path / "config.json").write_text(json.dumps(config))
    return model
