"""Reads the files of sentence-transformers in a checkpoint: `modules.json`, and the folders that it names."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import torch
from msgspec import Struct, field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from services.worker.models.config import ModelError
from services.worker.models.pooling.classification import ClassifierHead
from services.worker.models.pooling.pooler_config import PoolingChoice
from shared.messages.generation import PoolingType
from shared.messages.model_card import PoolingCard

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
_T = TypeVar("_T")


class _Module(Struct):
    type: str
    path: str = ""


class _Pooling(Struct):
    """`1_Pooling/config.json`."""

    pooling_mode_cls_token: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_lasttoken: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode: str | None = None
    """In newer files, in place of the others: "lasttoken", "mean", "cls"."""


class _Dense(Struct):
    """`2_Dense/config.json`: a projection of the pooled state."""

    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    use_residual: bool = False
    module_input_name: str = "sentence_embedding"
    module_output_name: str | None = None


class _Described(NamedTuple):
    """What `modules.json` comes to."""

    pooling: PoolingType
    projections: tuple[Path, ...]
    """Folders of Dense modules, in their order."""
    normalizes: bool


class _Prompts(Struct):
    """Of `config_sentence_transformers.json`."""

    prompts: dict[str, str | None] | None = None


class _Matryoshka(Struct):
    """Of `config.json`."""

    matryoshka_dimensions: list[int] = field(default_factory=list)


_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "GELU": nn.GELU,
    "Identity": nn.Identity,
    "ReLU": nn.ReLU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
    "Tanh": nn.Tanh,
}
"""By the name of PyTorch's class, which sentence-transformers writes."""

_MODES: dict[str, PoolingType] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
}

_NAMES = {
    "lasttoken": "pooling_mode_lasttoken",
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
}


def read_pooling(folder: Path, choice: PoolingChoice, hidden_size: int) -> PoolingCard | None:
    """How prompts become vectors, which are normalized where the checkpoint does not say; None where they do not.
    Raises ModelError for files of sentence-transformers that ask for more than we do."""
    assert choice != "step", "a head judges steps"
    if choice == "none":
        return None
    described = folder / MODULES
    read = _described(described) if described.exists() else None
    pooling: PoolingType | None = choice if choice != "auto" else None if read is None else read.pooling
    if pooling is None:
        return None
    size = hidden_size
    for path in () if read is None else read.projections:
        size = _dense(path, size).out_features
    dimensions = _decode(folder / "config.json", _Matryoshka).matryoshka_dimensions
    for cut in dimensions:
        if not 1 <= cut <= size:
            raise ModelError(f"{folder / 'config.json'}: matryoshka_dimensions {cut} is not 1 to {size}")
    said = folder / PROMPTS
    prompts = _decode(said, _Prompts).prompts if read is not None and said.exists() else None
    return PoolingCard(
        pooling=pooling,
        normalize=read is None or read.normalizes,
        size=size,
        matryoshka=tuple(dimensions),
        prompts=tuple((name, text or "") for name, text in (prompts or {}).items()),
    )


def read_projections(folder: Path, hidden_size: int, device: torch.device) -> ClassifierHead | None:
    """What the checkpoint's Dense modules make of pooled states [k, hidden_size], in float32; None where there are
    none. Raises ModelError."""
    described = folder / MODULES
    paths = _described(described).projections if described.exists() else ()
    layers: list[nn.Module] = []
    for path in paths:
        module = _dense(path, hidden_size)
        layers += [_linear(path, module).to(device), _ACTIVATIONS[_name(module.activation_function)]()]
        hidden_size = module.out_features
    if not layers:
        return None
    projection = nn.Sequential(*layers)

    def project(states: Tensor) -> Tensor:
        projected: Tensor = projection(states)
        return projected

    return project


def _described(path: Path) -> _Described:
    pooling, normalizes = None, False
    projections: list[Path] = []
    for module in _decode(path, list[_Module]):
        kind = module.type.rpartition(".")[2]
        if kind == "Transformer" and not module.path:
            continue
        if kind == "Pooling" and pooling is None:
            pooling = _mode(path.parent / module.path / "config.json")
        elif kind == "Dense" and pooling is not None and not normalizes:
            projections.append(path.parent / module.path)
        elif kind == "Normalize" and pooling is not None:
            normalizes = True
        else:
            raise ModelError(
                f"{path}: the module {module.type} in {module.path or '.'!r} is not supported; supported are a "
                "Transformer in '.', then Pooling, then Dense, then Normalize"
            )
    if pooling is None:
        raise ModelError(f"{path}: it names no Pooling; --pooling-type none serves the model without embeddings")
    return _Described(pooling, tuple(projections), normalizes)


def _dense(folder: Path, size: int) -> _Dense:
    """The settings of a projection of vectors of `size`. Raises ModelError where it is not one that is supported."""
    path = folder / "config.json"
    found = _decode(path, _Dense)
    if found.in_features != size:
        raise ModelError(f"{path}: in_features {found.in_features}, but what it projects has {size}")
    name = found.activation_function
    if not name.startswith("torch.nn.") or _name(name) not in _ACTIVATIONS:
        raise ModelError(f"{path}: activation_function {name} is not supported; {', '.join(_ACTIVATIONS)} of PyTorch")
    names = {found.module_input_name, found.module_output_name or found.module_input_name}
    if found.use_residual or names != {"sentence_embedding"}:
        raise ModelError(f"{path}: use_residual, module_input_name and module_output_name are not supported")
    return found


def _name(activation: str) -> str:
    return activation.rpartition(".")[2]


def _linear(folder: Path, module: _Dense) -> nn.Module:
    path = folder / "model.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: {error}; a projection is read from safetensors only") from None
    linear = nn.Linear(module.in_features, module.out_features, bias=module.bias, device="meta")
    found = {name.removeprefix("linear."): tensor.float() for name, tensor in tensors.items()}
    try:
        linear.load_state_dict(found, assign=True)
    except RuntimeError as error:
        raise ModelError(f"{path}: {str(error).splitlines()[-1].strip()}") from None
    return linear.requires_grad_(False)


def _mode(path: Path) -> PoolingType:
    given = _decode(path, _Pooling)
    asked = [name for name in given.__struct_fields__ if name.startswith("pooling_mode_") and getattr(given, name)]
    if given.pooling_mode is not None:
        asked.append(_NAMES.get(given.pooling_mode, given.pooling_mode))
    if len(asked) != 1 or asked[0] not in _MODES:
        given_modes = " and ".join(asked) or "no pooling_mode"
        raise ModelError(f"{path}: {given_modes} is not supported; one of {', '.join(_MODES)} is")
    return _MODES[asked[0]]


def _decode(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist, though {MODULES} asks for it") from None
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path}: {error}") from None
