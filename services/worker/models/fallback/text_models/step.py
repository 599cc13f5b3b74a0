"""Step-3.5 (`Step3p5ForCausalLM`), which the library knows as a part of Step-3.7: the same language model, beside no
tower, by the published names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel

from services.worker.models.config import ModelError

_ONLY: dict[str, tuple[object, ...]] = {
    "att_impl_type": ("GQA",),
    "use_head_wise_attn_gate": (True,),
    "use_moe_router_bias": (True,),
    "moe_router_activation": ("sigmoid",),
    "norm_expert_weight": (True,),
    "zero_centered": (True,),
    "sink": (False,),
    "yarn_only_types": (["full_attention"],),
    "use_rope_layers": ([],),
}
"""What keys of the published configuration may say; the library has it so, whatever they do."""
_AS_OTHERS = ("num_attention_groups", "head_dim")
"""Of `attention_other_setting`, what layers with windows have as the others."""


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    """The library's text model with a head."""

    config_class = Step3p7TextConfig
    input_modalities = ["text"]  # noqa: RUF012 - as the library has it
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)  # type: ignore[no-untyped-call]
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, input_ids: Tensor | None = None, **beside: Any) -> CausalLMOutputWithPast:
        """ids [batch, n] → logits [batch, n, vocab]"""
        rows = self.model(input_ids=input_ids, **beside)[0]
        return CausalLMOutputWithPast(logits=self.lm_head(rows))


def register_step() -> None:
    """Makes the model known to the library, with what its tensors are called where it is published."""
    if Step3p7TextConfig in AutoModelForCausalLM._model_mapping:
        return
    AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
    renamed = [
        WeightRenaming(r"\.moe\.gate\.weight", ".mlp.gate.weight"),
        WeightRenaming(r"\.moe\.router_bias", ".mlp.gate.e_score_correction_bias"),
        WeightRenaming(r"\.moe\.down_proj\.weight", ".mlp.experts.down_proj"),
        WeightRenaming(r"\.share_expert\.", ".mlp.shared_experts."),
    ]
    gates_and_ups = WeightConverter(
        source_patterns=["moe.gate_proj.weight", "moe.up_proj.weight"],
        target_patterns="mlp.experts.gate_up_proj",
        operations=[Concatenate(dim=1)],
    )
    register_checkpoint_conversion_mapping(Step3p5ForCausalLM.__name__, [*renamed, gates_and_ups])


def check_step(folder: Path) -> None:
    """Of a Step-3.5. Raises ModelError for what the library does not compute, though the configuration asks for it."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key, allowed in _ONLY.items():
        value = raw.get(key)
        if value is not None and value not in allowed:
            raise ModelError(f"{key} {json.dumps(value)} is not supported; {json.dumps(allowed[0])} is")
    others = raw.get("attention_other_setting") or {}
    for key in _AS_OTHERS:
        if others.get(key) not in (None, raw.get(key)):
            raise ModelError(f"attention_other_setting: {key} {others[key]} is not supported; {raw.get(key)} is")
