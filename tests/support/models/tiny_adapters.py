"""Random LoRA adapters as PEFT writes them, and the same merged into a reference: by the formula of its paper, or by
PEFT."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tests.support.models.tiny_models import TinyModel
from tests.support.paths import DEMO_MODEL

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def linear_layers(model: TinyModel) -> tuple[str, ...]:
    """The last parts of the names of all linear layers but the head, as PEFT's `all-linear` takes them, and but those
    of adapters that are the model's own."""
    named = ((name, each) for name, each in model.reference.named_modules() if "_adapter_list" not in name)
    return tuple(sorted({name.rpartition(".")[2] for name, each in named if isinstance(each, nn.Linear)} - {"lm_head"}))


def demo_reference() -> TinyModel:
    """The demo model, to write adapters of."""
    reference = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    return TinyModel("demo", DEMO_MODEL, reference)


def write_adapter(
    model: TinyModel,
    folder: Path,
    *,
    modules: Sequence[str] = ALL_LINEAR,
    r: int = 8,
    alpha: float = 16.0,
    rslora: bool = False,
    seed: int = 0,
    strength: float = 0.15,
    **config: Any,
) -> TinyModel:
    """Writes an adapter of `modules` to `folder`; the model with it merged. `config`: further fields of its file."""
    generator = torch.Generator().manual_seed(seed)
    merged, tensors = copy.deepcopy(model.reference), {}
    scale = alpha / (math.sqrt(r) if rslora else r)
    for name, module in merged.named_modules():
        if not f".{name}".endswith(tuple(f".{each}" for each in modules)):
            continue
        out, inputs = module.weight.shape
        if "shared_transformer" in name:  # whose modules have one weight at several depths, and adapters of their own
            module.weight = nn.Parameter(module.weight.detach().clone())
        embeds = name.endswith("embed_tokens")
        # An embedding's matrix is [words, hidden], and its product transposed.
        first, second = (out, inputs) if embeds else (inputs, out)
        a = torch.randn(r, first, generator=generator) * strength
        b = torch.randn(second, r, generator=generator) * strength
        kinds = ("embedding_A", "embedding_B") if embeds else ("A.weight", "B.weight")
        for kind, tensor in zip(kinds, (a, b), strict=True):
            tensors[f"base_model.model.{name}.lora_{kind}"] = tensor.contiguous()
        with torch.no_grad():
            if module.weight.device.type != "meta":  # a mere shape
                module.weight.add_(scale * ((b @ a).T if embeds else b @ a))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": r, "lora_alpha": alpha, "use_rslora": rslora}
    fields |= {"target_modules": list(modules), "bias": "none", "lora_dropout": 0.0, "init_lora_weights": True}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return TinyModel(model.family, folder, merged)


def peft_adapter(model: TinyModel, folder: Path, *, r: int, modules: Sequence[str] = ALL_LINEAR) -> TinyModel:
    """Has PEFT write an adapter of `modules` to `folder`; the model with it merged, by PEFT."""
    from peft import LoraConfig, get_peft_model  # of the extra dev

    torch.manual_seed(r)
    config = LoraConfig(
        r=r,
        lora_alpha=2.0,
        use_rslora=True,
        target_modules=list(modules),
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.reference.modules()),
    )
    adapted = get_peft_model(copy.deepcopy(model.reference), config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.15)
    adapted.save_pretrained(folder, save_embedding_layers=any("embed" in module for module in modules))
    return TinyModel(model.family, folder, adapted.merge_and_unload().eval())
