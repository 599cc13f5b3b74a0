"""What `transformers` computes with weights that were rounded, to compare quantised models with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from services.worker.ops.quantized import Code, quantize

SIZES = {"hidden_size": 64, "intermediate_size": 128}
"""Multiples of a group of int4."""


NEVER_ROUNDED = ("shared_expert_gate", "kv_b_proj")
"""How much of a shared expert is taken; what latents are multiplied with."""


def rounded(reference: Any, code: Code) -> None:
    """Puts in place of each linear layer's weight, and of each expert's, what its codes stand for."""
    head = reference.get_output_embeddings()
    with torch.no_grad():
        for name, module in reference.named_modules():
            for stack in ("gate_up_proj", "down_proj"):
                experts = getattr(module, stack, None)
                if isinstance(experts, nn.Parameter):
                    for expert in experts:
                        expert.copy_(quantize(expert, code).dequantized(torch.float32))
            if isinstance(module, nn.Linear) and not name.endswith(NEVER_ROUNDED):
                weight = quantize(module.weight, "int8" if module is head else code).dequantized(torch.float32)
                module.weight = nn.Parameter(weight)
            elif isinstance(module, Conv1D):
                weight = quantize(module.weight.T.contiguous(), code).dequantized(torch.float32)
                module.weight = nn.Parameter(weight.T)
