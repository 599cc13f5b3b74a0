"""What `transformers` computes with weights that were rounded, to compare quantised models with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.worker.ops.quantized import Code, Scheme, quantize, round_rows

SIZES = {"hidden_size": 64, "intermediate_size": 128}
"""Multiples of a group of int4."""


NEVER_ROUNDED = (
    *("shared_expert_gate", "kv_b_proj", "router", ".x_proj", ".dt_proj", "wq_b", "wk", "weights_proj"),
    *("compressor.kv_proj", "compressor.gate_proj", "indexer.kv_proj", "indexer.gate_proj", "indexer.q_b_proj"),
    *("o_a_proj", "indexer.q_proj", "indexer.k_proj", "index_qk_proj", "ple.key_proj", "ple.value_proj"),
    *("input_mix_weight_down", "input_mix_weight_up", "block_inject_weight"),
)
"""How much of a shared expert is taken; what latents are multiplied with; which experts are picked; what
Mamba-1's states are made of; which tokens are attended to; what entries of compressed keys are made of, and each group
of heads is multiplied with; what gates streams, and what n-grams add to them."""


SPLIT_BY_INPUTS = ("o_proj", "down_proj")
"""Of which each rank has a part of the inputs."""


ROUNDED_INPUTS: dict[Scheme, Code] = {"w8a8_int8": "int8", "w8a8_fp8": "fp8"}
"""What rows that linear layers multiply are rounded to, with each scheme that rounds them."""


def round_inputs(module: nn.Module, shares: int = 1, code: Code = "int8") -> None:
    """From now on, each row that `module` multiplies is rounded to `code`, or each rank's share of it is."""

    def rounding(_module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        parts = [round_rows(part.flatten(0, -2), code) for part in given[0].chunk(shares, dim=-1)]
        return (torch.cat([each.codes * each.scales for each in parts], dim=-1).view(given[0].shape),)

    module.register_forward_pre_hook(rounding)


def assert_same_steps(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Logits behind several prompts, where activations are rounded. The last bit of another order of sums may take an
    element to the next step, which changes all that follows by about the cost of rounding it: of a few prompts only."""
    differences = sorted(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    assert differences[len(differences) // 2] < 1e-4, differences


def rounded(reference: Any, code: Scheme, ranks: int = 1, *, experts: bool = True) -> None:
    """Puts in place of each linear layer's weight, and of each expert's, what its codes stand for. Of ROUNDED_INPUTS,
    rows that linear layers multiply are rounded, too, as `ranks` do it; experts' are not. `experts`: not of a mixture
    that `transformers` computes."""
    head = reference.get_output_embeddings()
    with torch.no_grad():
        for name, module in reference.named_modules():
            for stack in ("gate_up_proj", "up_proj", "down_proj"):
                stacked = getattr(module, stack, None)
                if experts and isinstance(stacked, nn.Parameter):
                    # gpt-oss has inputs before outputs.
                    turned = type(module).__name__ == "GptOssExperts"
                    for expert in stacked.transpose(1, 2) if turned else stacked:
                        expert.copy_(quantize(expert, code).dequantized(torch.float32))
            if isinstance(module, nn.Linear) and not name.endswith(NEVER_ROUNDED):
                weight = quantize(module.weight, "int8" if module is head else code).dequantized(torch.float32)
                module.weight = nn.Parameter(weight)
                if code in ROUNDED_INPUTS and module is not head:
                    round_inputs(module, ranks if name.endswith(SPLIT_BY_INPUTS) else 1, ROUNDED_INPUTS[code])
            elif isinstance(module, Conv1D):
                weight = quantize(module.weight.T.contiguous(), code).dequantized(torch.float32)
                module.weight = nn.Parameter(weight.T)
