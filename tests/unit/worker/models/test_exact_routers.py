"""Routers that are float32 in a run in bf16: the experts of every row are those of `transformers`' routers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.hf_config import read_model_config
from services.worker.models.loading import load_weights
from services.worker.models.published.names import library_names
from services.worker.models.sharding import shard_of
from services.worker.models.weights import MixtureMlp, route
from services.worker.ops.interface import Ops
from services.worker.ops.native.native_ops import NativeOps
from services.worker.ops.torch_ops import TorchOps
from shared.models.image_models import nests_language_model
from tests.support.models.tiny_models import TinyModel, make_model

CPU = torch.device("cpu")
FAMILIES = (
    *("deepseek-v2", "deepseek-v3", "deepseek-v4", "glm-5-next", "hy4", "kimi-linear", "mistral-large-4"),
    *("minimax-m3", "nemotron-h-moe"),
)


def mixtures(tiny: TinyModel, ops: Ops) -> list[MixtureMlp]:
    """Those whose routers choose."""
    config, whole = read_model_config(tiny.path), nests_language_model(tiny.path)
    opened = open_checkpoint(
        tiny.path, torch.bfloat16, base="model.", language_model=whole, rename=library_names(config)
    )
    with opened as checkpoint:
        weights = load_weights(checkpoint, config, shard_of(config, 0, 1), ops, CPU, 64)
    found = (layer.mlp for layer in weights.layers)
    return [mlp for mlp in found if isinstance(mlp, MixtureMlp) and mlp.by_token is None]


def routers(tiny: TinyModel) -> list[nn.Module]:
    named = tiny.reference.named_modules()
    return [each for _, each in named if type(each).__name__.endswith(("TopkRouter", "TopKRouter"))]


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_float32_router_chooses_the_librarys_experts_in_bf16(family: str, tmp_path: Path) -> None:
    """The library's is float32 here, as it is in its models in bf16: an input's chances are made of the same products.
    Rounded to bf16, ten rows and more would have other experts."""
    tiny = make_model(family, tmp_path)
    x = torch.randn(
        4000, read_model_config(tmp_path).hidden_size, generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    for ops in (NativeOps(CPU, torch.bfloat16), TorchOps(CPU, torch.bfloat16)):
        own = mixtures(tiny, ops)
        assert len(own) == len(routers(tiny)) > 0
        for mixture, router in zip(own, routers(tiny), strict=True):
            _, picks = route(ops, mixture, x)
            *_, experts = router(x.float())
            assert torch.equal(in_order(picks.experts), in_order(experts))


def in_order(experts: Tensor) -> Tensor:
    return experts.long().view(4000, -1).sort(dim=1).values
