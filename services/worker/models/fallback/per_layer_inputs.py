"""What Gemma 4 reads of a token beside its embedding, in each layer; of a row of an image, what it reads of padding."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from services.worker.ops.interface import InputRows


def of_gemma4(model: nn.Module) -> bool:
    """Whether images' tokens see each other in layers with a window alone. Those of the kind without towers do in every
    layer, as the library's pass has it."""
    return getattr(getattr(model, "config", None), "model_type", "") in ("gemma4", "gemma4_text")


class PerLayerInputs:
    """Holds the model that has a second embedding."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.padding: int = owner.config.pad_token_id or 0

    @staticmethod
    def of_model(model: nn.Module) -> PerLayerInputs | None:
        """None for a model that reads of a token its embedding alone, or more than can be said for it."""
        if not of_gemma4(model):
            return None
        owners = (each for each in model.modules() if getattr(each, "embed_tokens_per_layer", None) is not None)
        return next(map(PerLayerInputs, owners), None)

    def beside(self, inputs: InputRows, ids: Tensor) -> Tensor:
        """ids [n] of a step, of which `inputs` have no tokens → [1, n, layers, size]."""
        own = ids.long().index_fill(0, inputs.rows.long(), self.padding)
        found: Tensor = self._owner.get_per_layer_inputs(own.unsqueeze(0))
        return found
