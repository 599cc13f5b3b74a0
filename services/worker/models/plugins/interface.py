"""What a package implements to bring a model architecture, as a difference from one that Baton computes itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from services.worker.distributed.communicator import Communicator, Pipeline
from services.worker.models.config import ModelConfig as ModelConfig
from services.worker.models.decoder import Decoder as Decoder
from services.worker.models.sharding import LayerShard
from services.worker.models.weights import DecoderWeights
from services.worker.ops.interface import Ops


class DecoderParts(NamedTuple):
    """The arguments of a `Decoder`, in their order."""

    config: ModelConfig
    weights: DecoderWeights
    share: LayerShard
    ops: Ops
    communicator: Communicator
    pipeline: Pipeline


class ModelArchitecture:
    """One model of an architecture, made from its `config.json`. What a subclass leaves as it is, is that of `base`."""

    base: ClassVar[str] = "LlamaForCausalLM"
    """The native architecture that it differs from."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        """`raw`: the object in `config.json`. ValueError: the model is refused with that text."""
        self.raw = raw

    def base_config(self) -> Mapping[str, Any]:
        """The object that `config.json` of `base` would hold."""
        return self.raw

    def config(self, config: ModelConfig) -> ModelConfig:
        """How Baton computes it: `config` is what it read of `base_config`; msgspec's `replace` changes it."""
        return config

    def tensor_name(self, name: str) -> str:
        """The name in the checkpoint of the tensor that `base` calls `name`."""
        return name

    def decoder(self, parts: DecoderParts) -> Decoder:
        """What computes it: a `Decoder`, or a subclass that overrides some of `input_rows`, `queries`, `attend`,
        `mlp_output` and `logits`."""
        return Decoder(*parts)
