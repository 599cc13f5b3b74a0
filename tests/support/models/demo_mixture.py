"""The demo model as a mixture that says the same: each layer has several experts, all of them copies of its MLP, and a
random router (Komatsuzaki et al., "Sparse Upcycling", arXiv:2212.05055). Chances add up to 1, so a row whose picks are
not each computed once gets another output.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.paths import DEMO_MODEL

EXPERTS, CHOSEN = 4, 2
_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def write_demo_mixture(folder: Path) -> Path:
    """Writes it to `folder`, which is made."""
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, _, part = name.partition(".mlp.")
        if not part:
            tensors[name] = tensor
            continue
        block = f"{layer}.block_sparse_moe"
        for expert in range(EXPERTS):
            tensors[f"{block}.experts.{expert}.{_NAMES[part.removesuffix('.weight')]}.weight"] = tensor.clone()
        if f"{block}.gate.weight" not in tensors:
            router = torch.randn(EXPERTS, config["hidden_size"], generator=generator) / config["hidden_size"] ** 0.5
            tensors[f"{block}.gate.weight"] = router.to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder
