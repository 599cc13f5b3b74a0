"""Reads the files of sentence-transformers in a checkpoint: `modules.json`, and the folders that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct, field

from services.worker.models.config import ModelError
from shared.messages.generation import PoolingType
from shared.messages.lifecycle import PoolingCard

PoolingChoice = Literal["auto", "none", "last", "mean", "cls"]
"""auto: what the checkpoint says; where it says nothing it makes no vectors, as with none."""

MODULES = "modules.json"
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


class _Matryoshka(Struct):
    """Of `config.json`."""

    matryoshka_dimensions: list[int] = field(default_factory=list)


_MODES: dict[str, PoolingType] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}

_NAMES = {"lasttoken": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}


def read_pooling(folder: Path, choice: PoolingChoice, hidden_size: int) -> PoolingCard | None:
    """How prompts become vectors, which are normalized where the checkpoint does not say; None where they do not.
    Raises ModelError for files of sentence-transformers that ask for more than we do."""
    if choice == "none":
        return None
    described = folder / MODULES
    read = _described(described) if described.exists() else None
    if choice == "auto" and read is None:
        return None
    dimensions = _decode(folder / "config.json", _Matryoshka).matryoshka_dimensions
    for size in dimensions:
        if not 1 <= size <= hidden_size:
            raise ModelError(f"{folder / 'config.json'}: matryoshka_dimensions {size} is not 1 to {hidden_size}")
    pooling, normalizes = read or ("last", True)
    return PoolingCard(
        pooling=pooling if choice == "auto" else choice,
        normalize=normalizes,
        size=hidden_size,
        matryoshka=tuple(dimensions),
    )


def _described(path: Path) -> tuple[PoolingType, bool]:
    """(the pooling, whether vectors are normalized)."""
    pooling, normalizes = None, False
    for module in _decode(path, list[_Module]):
        kind = module.type.rpartition(".")[2]
        if kind == "Transformer" and not module.path:
            continue
        if kind == "Pooling" and pooling is None:
            pooling = _mode(path.parent / module.path / "config.json")
        elif kind == "Normalize" and pooling is not None:
            normalizes = True
        else:
            raise ModelError(
                f"{path}: the module {module.type} in {module.path or '.'!r} is not supported; supported are a "
                "Transformer in '.', then Pooling, then Normalize"
            )
    if pooling is None:
        raise ModelError(f"{path}: it names no Pooling; --pooling-type none serves the model without embeddings")
    return pooling, normalizes


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
