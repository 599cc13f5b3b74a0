"""A name for a model that tells its keys and values from any other's, without reading its weights."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec import Struct

from services.worker.model.checkpoint import checkpoint_files
from services.worker.model.config import ModelConfig, ModelError

_SAMPLE_BYTES = 1024
_DIGEST_BYTES = 16
_HEADER_LIMIT = 100 << 20
"""The format's own bound of a file's header."""


class _Entry(Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def model_digest(model_dir: Path, config: ModelConfig) -> str:
    """Hex BLAKE2b over the configuration, and over each tensor's name, type, shape, first and last KiB.

    The same however the checkpoint is cut into files, and for every rank. What was trained differs in (nearly) every
    element, so samples tell it. Raises ModelError for a broken checkpoint.
    """
    digest = blake2b(msgspec.json.encode(_of_computing(config)), digest_size=_DIGEST_BYTES)
    samples: dict[str, bytes] = {}
    for path in checkpoint_files(model_dir):
        samples |= _samples(path)
    for name in sorted(samples):
        digest.update(name.encode() + b"\0" + samples[name])
    return digest.hexdigest()


def made_up_digest(config: ModelConfig) -> str:
    """The same for weights that are made up at random: they are a function of the configuration."""
    return blake2b(b"made up" + msgspec.json.encode(_of_computing(config)), digest_size=_DIGEST_BYTES).hexdigest()


def _of_computing(config: ModelConfig) -> ModelConfig:
    """Without what keys and values do not depend on."""
    return msgspec.structs.replace(config, eos_token_ids=())


def _samples(path: Path) -> dict[str, bytes]:
    """Tensor → what is told of it. The format: https://huggingface.co/docs/safetensors."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _HEADER_LIMIT:
                raise ModelError(f"{path}: no safetensors file")
            header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
            found = {}
            for name, raw in header.items():
                if name == "__metadata__":
                    continue
                entry = msgspec.json.decode(raw, type=_Entry)
                start, end = (8 + length + offset for offset in entry.data_offsets)
                size = min(_SAMPLE_BYTES, end - start)
                file.seek(start)
                first = file.read(size)
                file.seek(end - size)
                found[name] = f"{entry.dtype}{entry.shape}".encode() + first + file.read(size)
            return found
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path}: {error}") from None
