"""Tiny models with a module that predicts further tokens, as published, and what `transformers` makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.models.tiny_models import TinyModel, make_model

_LAYERS = 3
_QWEN = {
    "layer": "mtp.layers.0",
    "embedding": "mtp.pre_fc_norm_embedding",
    "hidden": "mtp.pre_fc_norm_hidden",
    "joined": "mtp.fc",
    "last": "mtp.norm",
}
_BEHIND = f"model.layers.{_LAYERS}"
_DEEPSEEK = {
    "layer": _BEHIND,
    "embedding": f"{_BEHIND}.enorm",
    "hidden": f"{_BEHIND}.hnorm",
    "joined": f"{_BEHIND}.eh_proj",
    "last": f"{_BEHIND}.shared_head.norm",
}


class MtpModel(NamedTuple):
    model: TinyModel
    layer: nn.Module
    """The module's layer, of `transformers`."""
    norms: dict[str, Tensor]
    """What rows are multiplied with behind each norm: "embedding", "hidden", "last"."""
    joined: Tensor

    @torch.no_grad()
    def logits(self, hidden: Tensor, following: list[int]) -> Tensor:
        """hidden [n, hidden] of the model, normed, each with the token behind it → [n, vocab]."""
        reference = self.model.reference
        embedded = reference.model.embed_tokens.weight[torch.tensor(following)]
        pair = torch.cat((self._norm(embedded, "embedding"), self._norm(hidden, "hidden")), dim=1)
        rows = (pair @ self.joined.T).unsqueeze(0)
        places = torch.arange(len(following)).unsqueeze(0)
        mask = torch.full((len(following), len(following)), -torch.inf).triu(1)
        turn = reference.model.rotary_emb(rows, places)
        out = self.layer(
            rows, attention_mask=mask[None, None], position_ids=places, position_embeddings=turn, use_cache=False
        )
        out = (out[0] if isinstance(out, tuple) else out)[0]
        return self._norm(out, "last") @ reference.lm_head.weight.T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * (x.square().mean(-1, keepdim=True) + self.model.reference.config.rms_norm_eps).rsqrt()
        return scaled * self.norms[name]


def make_mtp(family: str, path: Path) -> MtpModel:
    """A checkpoint of one layer more than the model has, which is the module's."""
    qwen = family.startswith("qwen")
    types = {"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]}
    model = make_model(family, path, num_hidden_layers=_LAYERS + 1, **(types if qwen else {}))
    names = _QWEN if qwen else _DEEPSEEK
    tensors = {
        name.replace(f"{_BEHIND}.", f"{names['layer']}."): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    hidden = model.reference.config.hidden_size
    norms = {name: 1 + 0.2 * torch.randn(hidden) for name in ("embedding", "hidden", "last")}
    joined = torch.randn(hidden, 2 * hidden) * 0.2
    tensors |= {f"{names[name]}.weight": norm - 1 if qwen else norm for name, norm in norms.items()}
    tensors[f"{names['joined']}.weight"] = joined
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    own = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": _LAYERS, "num_nextn_predict_layers": 1}
    if qwen:
        own["layer_types"] = own["layer_types"][:_LAYERS]
    (path / "config.json").write_text(json.dumps(own))
    layer = model.reference.model.layers[_LAYERS]
    model.reference.model.layers = model.reference.model.layers[:_LAYERS]
    model.reference.config.num_hidden_layers = _LAYERS
    if qwen:
        model.reference.config.layer_types = own["layer_types"]
    return MtpModel(model, layer, norms, joined)
