"""A model as transformers has it, with the weights of its folder or those that our workers make up."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from services.worker.loaded_model import dtype_of
from services.worker.model.config import ModelConfig
from services.worker.model.hf_config import read_model_config
from services.worker.model.random_weights import RandomTensors
from services.worker.peer.wire import PeerAsked


def library(module: str = "transformers") -> Any:
    """transformers, whose types are not those that it has at run time. Raises ImportError."""
    return import_module(module)


def load(asked: PeerAsked, device: torch.device) -> Any:
    """In the dtype that our worker would choose. Raises ModelError, and what transformers raises."""
    folder = Path(asked.folder)
    config = read_model_config(folder)
    dtype = getattr(torch, dtype_of(asked.dtype, config, device))
    how = {"dtype": dtype} if asked.attention == "auto" else {"dtype": dtype, "attn_implementation": asked.attention}
    if asked.load_format == "dummy":
        return _made_up(folder, config, device, how)
    return library().AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **how).to(device)


def _made_up(folder: Path, config: ModelConfig, device: torch.device, how: dict[str, Any]) -> Any:
    shape = library().AutoConfig.from_pretrained(folder, local_files_only=True)
    with device:
        model = library().AutoModelForCausalLM.from_config(shape, **how)
    tensors = RandomTensors(how["dtype"], device, norm_offset=config.norm_offset)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors.read(_name(name), tuple(parameter.shape)))
    return model


def _name(name: str) -> str:
    """By which our loader asks for it: weights that are made up depend on it, and it finds experts under Mixtral's."""
    for part in ("gate.", "experts."):
        name = name.replace(f".mlp.{part}", f".block_sparse_moe.{part}")
    return name
