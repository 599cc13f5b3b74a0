"""The demo model with windows in some of its layers: what it says then is still text, though not always right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.paths import DEMO_MODEL

WINDOW = 48
LAYERS = ("sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention")


def write_windowed_demo(folder: Path) -> Path:
    """As a Qwen2, the family that has windows by the layer: its biases are zero. Returns `folder`."""
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
    config |= {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": LAYERS,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = load_file(DEMO_MODEL / "model.safetensors")
    for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        weights[name.removesuffix("weight") + "bias"] = torch.zeros(len(weights[name]), dtype=weights[name].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
